"""Turns an interface's segmentation offloads on or off, as ethtool does: `python segment_offload.py eth0 off`.

With them, the kernel hands packets of up to 64 KiB to a virtual interface, which no MTU holds up.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import sys

_SIOCETHTOOL = 0x8946
# ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO
_COMMANDS = (0x1F, 0x24, 0x2C)


def main() -> None:
    interface, state = sys.argv[1:]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in _COMMANDS:
            value = array.array("B", struct.pack("II", command, state == "on"))
            request = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(any_socket.fileno(), _SIOCETHTOOL, request)


if __name__ == "__main__":
    main()
