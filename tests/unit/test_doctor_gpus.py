"""What `trainer doctor --gpu` concludes from nvidia-smi's output.

The texts are written after NVIDIA's documentation of the format. None of them comes from a machine.
"""

from __future__ import annotations

import pytest

from tests.unit.doctor_facts import found, healthy, machine, software, the_only
from trainer.doctor.agent.machine import NO_LIMIT
from trainer.doctor.checks.gpus import read_query, read_topology
from trainer.doctor.facts import Facts

LINE = "{index}, NVIDIA H100 80GB HBM3, {driver}, {persistence}, {ecc}, {hot}, {braked}\n"
WELL = {"driver": "580.65.06", "persistence": "Enabled", "ecc": "0", "hot": "Not Active", "braked": "Not Active"}
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \t{link}\t{near}\t0-31\t0\n"
    "GPU1\t{link}\t X \t{far}\t0-31\t0\n"
    "NIC0\t{near}\t{far}\t X \n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
)


def with_gpus(query: str, topology: str = "", peer_memory: str = "nvidia_peermem", *, rdma: bool = False) -> Facts:
    output = {"query": query, "topology": topology, "peer_memory": peer_memory}
    machines = {"a": machine("a"), "b": machine("b", has_rdma=rdma, locked_memory=NO_LIMIT)}
    return healthy(gpus={"b": output}, machines=machines)


def two(**changes: str) -> str:
    return LINE.format(index=0, **WELL) + LINE.format(index=1, **{**WELL, **changes})


def test_two_gpus_in_order_are_no_finding() -> None:
    topology = TOPOLOGY.format(link="NV18", near="PIX", far="PXB")
    assert [gpu.index for gpu in read_query(two())] == ["0", "1"]
    assert read_topology(topology)["GPU0", "GPU1"] == "NV18"
    assert found(with_gpus(two(), topology, rdma=True)) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"ecc": "3"}, "PROBLEM: GPU 1 (NVIDIA H100 80GB HBM3) of b has 3 uncorrected memory errors"),
        ({"hot": "Active"}, "WARNING: GPU 1 (NVIDIA H100 80GB HBM3) of b is slowed down because of its temperature"),
        ({"braked": "Active"}, "slowed down because of its power supply"),
        ({"persistence": "Disabled"}, "WARNING: persistence mode is off for GPU 1"),
    ],
)
def test_the_state_of_a_gpu(changes: dict[str, str], line: str) -> None:
    assert line in the_only(with_gpus(two(**changes)))
    assert found(with_gpus(two(ecc="[N/A]"))) == []


def test_too_few_gpus_or_none() -> None:
    assert "b has 1 of the 2 GPUs that its ranks need; name fewer slots (-H b:1)" in the_only(
        with_gpus(LINE.format(index=0, **WELL))
    )
    assert "b has 0 of the 2 GPUs that its ranks need; `nvidia-smi` there has to list a GPU" in the_only(with_gpus(""))


def test_a_driver_that_is_too_old_and_pytorch_without_cuda() -> None:
    old = "".join(LINE.format(index=index, **{**WELL, "driver": "550.54.15"}) for index in (0, 1))
    assert "the driver of b, 550.54.15, is too old for PyTorch's CUDA 13.0; install driver 580 or newer" in the_only(
        with_gpus(old)
    )
    versions = {"CUDA": ""}
    facts = with_gpus(two())
    facts = healthy(gpus=facts.gpus, software={"a": software(versions=versions), "b": software(versions=versions)})
    assert "PyTorch on b was built without CUDA" in the_only(facts)


def test_places_of_gpus_and_adapters() -> None:
    apart = TOPOLOGY.format(link="SYS", near="PIX", far="PXB")
    assert "b has GPUs on different sockets (GPU0, GPU1)" in the_only(with_gpus(two(), apart))
    distant = TOPOLOGY.format(link="NV18", near="PIX", far="SYS")
    assert "another socket than every adapter: GPU1" in the_only(with_gpus(two(), distant))
    near = TOPOLOGY.format(link="NV18", near="PIX", far="PXB")
    assert "no nvidia_peermem" in the_only(with_gpus(two(), near, peer_memory="", rdma=True))
