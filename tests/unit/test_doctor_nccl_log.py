"""What is read from NCCL's log. Its lines are written after NCCL's own formats; none of them comes from a run here."""

from __future__ import annotations

import pytest

from trainer.ops.doctor.nccl_log import describe_transports, read_transports

HEAD = """\
a:71:71 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to =eth0
a:71:71 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
a:71:71 [0] NCCL INFO NCCL version 2.30.7+cuda13.0
a:71:95 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
a:71:95 [0] NCCL INFO Channel 00/02 : 0 1 2 3
"""
LINE = "a:71:95 [0] NCCL INFO Channel 00/0 : {}\n"


@pytest.mark.parametrize(
    ("connection", "transport"),
    [
        ("3[3] -> 0[0] [receive] via NET/IB/0/GDRDMA", "NET/IB with GPUDirect RDMA"),
        ("0[0] -> 2[0] [send] via NET/IB/1(1)/GDRDMA/Shared", "NET/IB with GPUDirect RDMA"),
        ("0[0] -> 2[0] [send] via NET/IB/0/GDRDMA(PCI)", "NET/IB with GPUDirect RDMA"),
        ("0[0] -> 2[0] [send] via NET/IBext_v8/2", "NET/IBext_v8 without GPUDirect RDMA"),
        ("0[0] -> 2[0] [send] via NET/AWS Libfabric/0/GDRDMA", "NET/AWS Libfabric with GPUDirect RDMA"),
        ("0[0] -> 2[0] [send] via COLLNET/SHARP/0/GDRDMA", "NET/SHARP with GPUDirect RDMA"),
        ("1[0] -> 0[0] [receive] via NET/Socket/0", "TCP sockets"),
        ("0[0] -> 1[1] via P2P/CUMEM/read", "P2P"),
        ("0[0] -> 1[1] via P2P/IPC", "P2P"),
        ("0[0] -> 1[1] via SHM/direct/direct", "shared memory"),
        ("0[1a0] -> 1[1b0] via direct shared memory", "shared memory"),
    ],
)
def test_a_connection_tells_its_transport(connection: str, transport: str) -> None:
    assert read_transports(HEAD + LINE.format(connection)) == {transport}


def test_transports_of_all_ranks_are_a_few_words() -> None:
    assert read_transports(HEAD) == set()
    assert describe_transports([]) == ""
    log = LINE.format("0[0] -> 2[0] [send] via NET/IB/0/GDRDMA") + LINE.format("0[0] -> 1[1] via P2P/CUMEM") * 2
    assert describe_transports(read_transports(log)) == "P2P, NET/IB with GPUDirect RDMA"
    assert describe_transports({"TCP sockets", "shared memory"}) == "shared memory, TCP sockets"
