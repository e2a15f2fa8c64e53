"""Delays every Ethernet frame to and from a container by a fixed time, without loss or reordering.

    python benchmarks/delay_line.py PID MILLISECONDS        # as root; until it is terminated

It is for kernels without netem. The container's veth device is taken off its bridge and replaced there by a tap device.
This process forwards frames between the two. Frames that the kernel has not segmented yet stay whole: both sides use
the virtio header, which describes them.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import selectors
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

from trainer.ops.processes import INTERRUPTS, interrupt_on

# From linux/if_tun.h, linux/if_packet.h and linux/if_ether.h.
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04
_SOL_PACKET, _PACKET_VNET_HDR, _ETH_P_ALL, _PACKET_OUTGOING = 263, 15, 3, 4
_HEADER_BYTES = 10
_FRAME_BYTES = 2**17
_TAP = "delayline0"


def main() -> int:
    if len(sys.argv) != 3:
        print(
            "delay_line: usage: delay_line.py PID MILLISECONDS; PID is a process in the container's network",
            file=sys.stderr,
        )
        return 2
    pid, delay_s = sys.argv[1], float(sys.argv[2]) / 1e3
    interrupt_on(*INTERRUPTS)
    veth = _veth_of(pid)
    bridge = Path(f"/sys/class/net/{veth}/master").resolve().name
    tap = _open_tap()
    packets = _open_veth(veth)
    try:
        _ip("link", "set", veth, "nomaster")
        _ip("link", "set", _TAP, "master", bridge, "up")
        print(f"frames between {veth} and {bridge} are delayed by {delay_s * 1e3:g} ms", flush=True)
        _forward(tap, packets, delay_s)
    except KeyboardInterrupt:
        pass
    finally:
        os.close(tap)
        _ip("link", "set", veth, "master", bridge)
    return 0


def _forward(tap: int, packets: socket.socket, delay_s: float) -> None:
    """Forward frames in both directions, each when its delay is over."""
    waiting: list[tuple[float, int, bytes, bool]] = []
    number = 0
    selector = selectors.DefaultSelector()
    selector.register(tap, selectors.EVENT_READ)
    selector.register(packets, selectors.EVENT_READ)
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(left):
            from_tap = key.fd == tap
            try:
                if from_tap:
                    frame = os.read(tap, _FRAME_BYTES)
                else:
                    frame, sender = packets.recvfrom(_FRAME_BYTES)
                    if sender[2] == _PACKET_OUTGOING:  # sent by this process itself
                        continue
            except BlockingIOError:
                continue
            heapq.heappush(waiting, (time.monotonic() + delay_s, number, frame, from_tap))
            number += 1
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, frame, from_tap = heapq.heappop(waiting)
            if from_tap:
                packets.send(frame)
            else:
                os.write(tap, frame)


def _open_tap() -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", _TAP.encode(), flags))
    fcntl.ioctl(device, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER_BYTES))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    return device


def _open_veth(name: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**26)
    opened.bind((name, 0))
    return opened


def _veth_of(pid: str) -> str:
    """Return the host's end of the veth pair whose other end is eth0 in the process's network."""
    # From ip, because /sys shows the network namespace in which it was mounted.
    command = ["nsenter", "--target", pid, "--net", "ip", "-oneline", "link", "show", "eth0"]
    line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    index = line.split("@if")[1].split(":")[0]
    for device in Path("/sys/class/net").iterdir():
        if (device / "ifindex").read_text().strip() == index:
            return device.name
    raise SystemExit(f"delay_line: no device of this host has index {index}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
