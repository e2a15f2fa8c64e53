"""What `trainer doctor --gpu` concludes from what nvidia-smi, lspci and the kernel print.

The texts are written after the formats of these programs. None of them comes from a machine here.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.doctor_facts import findings_of, healthy, machine, software, the_only
from trainer.ops.doctor.agent.gpus import address_of
from trainer.ops.doctor.agent.host import NO_LIMIT
from trainer.ops.doctor.checks.gpus import has_dma_buf, read_matrix, read_query, read_redirecting
from trainer.ops.doctor.facts import Facts

LINE = "{index}, NVIDIA H100 80GB HBM3, {driver}, {persistence}, {ecc}, {hot}, {braked}, 00000000:{bus}:00.0\n"
WELL = {
    "driver": "580.65.06",
    "persistence": "Enabled",
    "ecc": "0",
    "hot": "Not Active",
    "braked": "Not Active",
    "bus": "3B",
}
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \t{link}\t{near}\t0-31\t0\t\tN/A\n"
    "GPU1\t{link}\t X \t{far}\t0-31\t0\t\tN/A\n"
    "NIC0\t{near}\t{far}\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
PEERS = (
    " \t\x1b[4mGPU0\tGPU1\x1b[0m\n GPU0\tX\t{status}\n GPU1\t{status}\tX\n"
    "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n  GNS  = GPU not supported\n"
)
ACS = """\
0000:3a:00.0 PCI bridge: Intel Corporation Sky Lake-E PCI Express Root Port A (rev 07) (prog-if 00 [Normal decode])
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
0000:3b:00.0 3D controller: NVIDIA Corporation Device 2330 (rev a1)
0000:3d:00.0 PCI bridge: PLX Technology, Inc. PEX 8747 (prog-if 00 [Normal decode])
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir{one} CmpltRedir{one} UpstreamFwd+ EgressCtrl- DirectTrans-
0000:3d:01.0 PCI bridge: PLX Technology, Inc. PEX 8747 (prog-if 00 [Normal decode])
\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir{other} CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-
"""
SWITCH = ["pci0000:3a", "0000:3a:00.0", "0000:3c:00.0"]


def pci(iommu: str = "", *, share_a_switch: bool = True) -> dict[str, Any]:
    bridges = [[*SWITCH, "0000:3d:00.0"], [*SWITCH, "0000:3d:01.0"]]
    if not share_a_switch:
        bridges = [["pci0000:3a", "0000:3a:00.0"], ["pci0000:3a", "0000:3a:02.0"]]
    places = zip(("0000:3b:00.0", "0000:5e:00.0"), bridges, strict=True)
    return {address: {"bridges": way, "iommu": iommu} for address, way in places}


def gpus_of_b(query: str, topology: str = "", **changes: Any) -> dict[str, Any]:
    return {
        "query": query,
        "topology": topology,
        "p2p": "",
        "peer_memory": "nvidia_peermem",
        "driver": "",
        "acs": "",
        "kernel": "6.1.0-13-amd64",
        "pci": {},
        "environment": {},
    } | changes


def with_gpus(query: str, topology: str = "", *, rdma: bool = False, **changes: Any) -> Facts:
    machines = {"a": machine("a"), "b": machine("b", has_rdma=rdma, locked_memory=NO_LIMIT)}
    return healthy(gpus={"b": gpus_of_b(query, topology, **changes)}, machine=machines)


def two(**changes: str) -> str:
    return LINE.format(index=0, **WELL) + LINE.format(index=1, **{**WELL, "bus": "5E", **changes})


def near(link: str) -> str:
    return TOPOLOGY.format(link=link, near="PIX", far="PXB")


def test_two_gpus_in_order_are_no_finding() -> None:
    assert [gpu.number for gpu in read_query(two())] == ["0", "1"]
    assert read_matrix(near("NV18"))["GPU0", "GPU1"] == "NV18"
    assert read_matrix(near("NV18"))["GPU1", "NIC0"] == "PXB"
    for link in ("NV18", "PIX", "NODE"):
        assert findings_of(with_gpus(two(), near(link), rdma=True, p2p=PEERS.format(status="OK"), pci=pci())) == []


@pytest.mark.parametrize(
    "text",
    [
        PEERS.format(status="CNS"),
        "        GPU0    GPU1    \n GPU0   X       CNS     \n GPU1   CNS     X       \n\nLegend:\n\n  X    = Self\n",
        "P2P Connectivity Matrix\n        GPU0  GPU1\nGPU0      X   CNS\nGPU1    CNS     X\n",
    ],
)
def test_a_matrix_of_any_width(text: str) -> None:
    assert read_matrix(text) == {("GPU0", "GPU1"): "CNS", ("GPU1", "GPU0"): "CNS"}


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
    assert findings_of(with_gpus(two(ecc="[N/A]"))) == []


def test_too_few_gpus_or_none() -> None:
    assert "b has 1 of the 2 GPUs that its ranks need; name fewer slots (-H b:1)" in the_only(
        with_gpus(LINE.format(index=0, **WELL))
    )
    assert "b has 0 of the 2 GPUs that its ranks need; `nvidia-smi` there has to list a GPU" in the_only(with_gpus(""))


def test_a_gpu_whose_row_cannot_be_read_does_not_rename_those_that_follow() -> None:
    query = "0, GPU requires reset\n" + "".join(LINE.format(index=index, **WELL) for index in (1, 2))
    head = "\tGPU0\tGPU1\tGPU2\n"
    links = f"{head}GPU0\tX\tNV18\tNV18\nGPU1\tNV18\tX\tPIX\nGPU2\tNV18\tPIX\tX\n"
    statuses = f"{head}GPU0\tX\tOK\tOK\nGPU1\tOK\tX\tCNS\nGPU2\tOK\tCNS\tX\n"
    assert "GPU1, GPU2 of b" in the_only(with_gpus(query, links, p2p=statuses))


def test_a_driver_that_is_too_old_and_pytorch_without_cuda() -> None:
    old = "".join(LINE.format(index=index, **{**WELL, "driver": "550.54.15"}) for index in (0, 1))
    assert "the driver of b, 550.54.15, is too old for PyTorch's CUDA 13.0; install driver 580 or newer" in the_only(
        with_gpus(old)
    )
    versions = {"CUDA": ""}
    facts = healthy(
        gpus={"b": gpus_of_b(two())}, software={"a": software(versions=versions), "b": software(versions=versions)}
    )
    assert "PyTorch on b was built without CUDA" in the_only(facts)


@pytest.mark.parametrize(
    ("link", "status", "changes", "line"),
    [
        (
            "SYS",
            "OK",
            {},
            "b has GPUs on different sockets (GPU0, GPU1), so that what they exchange goes through both "
            "processors; `nvidia-smi topo -m`; give a job the GPUs of one socket",
        ),
        ("SYS", "TNS", {}, "goes through both processors, and the host's memory; `nvidia-smi topo -m`"),
        (
            "PHB",
            "CNS",
            {"pci": pci("DMA-FQ", share_a_switch=False)},
            "GPU0, GPU1 of b exchange through the host's memory: the IOMMU translates what they send; `iommu=pt`",
        ),
        (
            "PIX",
            "OK",
            {"pci": pci("DMA")},
            "GPU0, GPU1 of b exchange by way of the processor, which is slow or hangs: "
            "the IOMMU translates what they send",
        ),
        (
            "PIX",
            "OK",
            {"pci": pci("identity"), "acs": ACS.format(one="+", other="-")},
            "which is slow or hangs: ACS is on in the bridges between them (0000:3d:00.0); ACS off in the firmware, or "
            "`sudo setpci -s 0000:3d:00.0 ECAP_ACS+0x6.w=0000`",
        ),
        (
            "PIX",
            "CNS",
            {"pci": pci(), "acs": ACS.format(one="+", other="+")},
            "exchange through the host's memory: ACS is on in the bridges between them (0000:3d:00.0, 0000:3d:01.0)",
        ),
        ("NODE", "TNS", {}, "through the host's memory: they are below different PCIe roots"),
        ("PIX", "TNS", {}, "through the host's memory: there is no P2P on the way between them"),
        ("PHB", "CNS", {}, "through the host's memory: the driver has no P2P for this chipset or this model of GPU"),
        ("PHB", "GNS", {}, "through the host's memory: their model has no P2P"),
        ("NV18", "DR", {"pci": pci("DMA")}, "through the host's memory: an option of the driver has P2P off"),
        ("PHB", "U", {}, "through the host's memory: the driver gives no reason (U); install a newer driver"),
        ("NV18", "OK", {"environment": {"NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE is set on b"),
    ],
)
def test_why_gpus_cannot_reach_each_other(link: str, status: str, changes: dict[str, Any], line: str) -> None:
    assert line in the_only(with_gpus(two(), near(link), p2p=PEERS.format(status=status), **changes))


@pytest.mark.parametrize(
    ("link", "changes"),
    [
        ("PIX", {"pci": pci("identity"), "acs": ACS.format(one="-", other="-")}),
        ("PHB", {"pci": pci(share_a_switch=False), "acs": ACS.format(one="+", other="+")}),
        ("NV18", {"pci": pci("DMA-FQ"), "acs": ACS.format(one="+", other="+")}),
        ("NV18", {"environment": {"NCCL_P2P_DISABLE": "0"}}),
    ],
)
def test_what_does_not_keep_gpus_apart(link: str, changes: dict[str, Any]) -> None:
    assert findings_of(with_gpus(two(), near(link), p2p=PEERS.format(status="OK"), **changes)) == []


def test_pairs_with_one_reason_are_one_finding() -> None:
    query = "".join(LINE.format(index=index, **{**WELL, "bus": f"{index}B"}) for index in range(3))
    names = ("GPU0", "GPU1", "GPU2")
    matrix = "\t" + "\t".join(names) + "\n"
    rows = ["\t".join([row, *("X" if row == column else "{0}" for column in names)]) for row in names]
    text = matrix + "\n".join(rows) + "\n"
    facts = with_gpus(query, text.replace("{0}", "PHB"), p2p=text.replace("{0}", "GNS"))
    assert "GPU0, GPU1, GPU2 of b exchange through the host's memory" in the_only(facts)


def test_devices_that_redirect() -> None:
    assert read_redirecting(ACS.format(one="+", other="-")) == {"0000:3a:00.0", "0000:3d:00.0"}
    assert address_of("0, NVIDIA L4, 00000001:AF:00.0") == "0001:af:00.0"


@pytest.mark.parametrize(
    ("far", "changes", "line"),
    [
        ("SYS", {}, "b has GPUs on another socket than every adapter: GPU1"),
        (
            "NODE",
            {},
            "b has GPUs below another PCIe root than every adapter: GPU1; `nvidia-smi topo -m`; GPUDirect "
            "RDMA wants PIX or PXB",
        ),
        ("PHB", {}, "b has GPUs on another PCIe switch than every adapter: GPU1"),
        ("PXB", {"peer_memory": ""}, "b has RDMA adapters and no nvidia_peermem"),
        ("PXB", {"environment": {"NCCL_IB_DISABLE": "1"}}, "NCCL_IB_DISABLE is set on b, so that NCCL takes TCP"),
    ],
)
def test_what_keeps_adapters_from_the_gpus(far: str, changes: dict[str, Any], line: str) -> None:
    topology = TOPOLOGY.format(link="NV18", near="PIX", far=far)
    assert line in the_only(with_gpus(two(), topology, rdma=True, **changes))


def test_what_gpudirect_rdma_works_with() -> None:
    open_modules = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
    assert findings_of(with_gpus(two(), near("NV18"), rdma=True, peer_memory="", driver=open_modules)) == []
    assert not has_dma_buf({"driver": open_modules, "kernel": "5.10.0-26-amd64"})
    assert not has_dma_buf({"driver": "NVRM version: NVIDIA UNIX x86_64 Kernel Module", "kernel": "6.1.0"})
    below = TOPOLOGY.format(link="NV18", near="PHB", far="PHB")
    level = {"NCCL_NET_GDR_LEVEL": "PHB"}
    assert findings_of(with_gpus(two(), below, rdma=True, environment=level)) == []
