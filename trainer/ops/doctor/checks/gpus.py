"""GPUs: their number, their driver, the state of each, and the result of an all-reduce."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from trainer.ops.doctor.facts import AllReduce, Facts, HostFacts
from trainer.ops.doctor.finding import About, Cause, Finding, Level
from trainer.ops.ssh import NO_ANSWER

# The oldest driver that runs programs of a CUDA's major version (CUDA Toolkit release notes, minor version
# compatibility).
_LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}


class Gpu(NamedTuple):
    """A line of nvidia-smi's query, as it prints it."""

    number: str
    name: str
    driver: str
    ecc_errors: str
    hot: str
    power_braked: str


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with the GPUs of the hosts, where they were looked at."""
    findings = [finding for host in facts.answering if host.gpus is not None for finding in _of_host(host)]
    yield from findings
    broken = {host for finding in findings if finding.level is Level.PROBLEM for host in finding.hosts}
    for tried in facts.all_reduces:
        if not tried.result and broken.isdisjoint(tried.hosts):  # else it is explained already
            yield _failure(tried)
        elif tried.result.get("wrong"):
            yield About(Cause.GPU, *tried.hosts).problem(f"{_title(tried)} computes wrong sums", _WITHOUT_P2P)


def _of_host(host: HostFacts) -> Iterator[Finding]:
    about, gpus = About(Cause.GPU, host), read_query(host.gpus or "")
    yield from _present(about, host, gpus)
    for gpu in gpus:
        name = f"GPU {gpu.number} ({gpu.name}) of {host}"
        if gpu.ecc_errors.isdecimal() and int(gpu.ecc_errors) > 0:
            yield about.problem(
                f"{name} has {gpu.ecc_errors} uncorrected memory errors",
                f"`sudo nvidia-smi --gpu-reset -i {gpu.number}` with no job on it; where they come again, replace it",
            )
        if "Active" in (gpu.hot, gpu.power_braked):
            text = f"{name} is slowed down because of its {'temperature' if gpu.hot == 'Active' else 'power supply'}"
            yield about.warning(text, f"`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {gpu.number}`")


def read_query(text: str) -> list[Gpu]:
    """Return the GPUs of `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [Gpu(*row) for row in rows if len(row) == len(Gpu._fields)]


def _present(about: About, host: HostFacts, gpus: list[Gpu]) -> Iterator[Finding]:
    cuda = host.versions.get("CUDA", "")
    if len(gpus) < host.slots:
        fewer = f"name fewer slots (-H {host}:{len(gpus)}), or give the container its GPUs (--gpus all)"
        none = "`nvidia-smi` there has to list a GPU; a container needs --gpus all"
        text = f"{host} has {len(gpus)} of the {host.slots} GPUs that its ranks need"
        yield about.problem(text, fewer if gpus else none)
    if gpus and not cuda:
        yield about.problem(f"PyTorch on {host} was built without CUDA", "install PyTorch's CUDA wheels")
    least = _LEAST_DRIVER.get(cuda.partition(".")[0], 0)
    major = gpus[0].driver.partition(".")[0] if gpus else ""
    if major.isdecimal() and int(major) < least:
        text = f"the driver of {host}, {gpus[0].driver}, is too old for PyTorch's CUDA {cuda}"
        yield about.problem(text, f"install driver {least} or newer, or PyTorch for an older CUDA")


# The all-reduces that were tried: whether each ends, and whether it is right

_WARNING = re.compile(r"NCCL WARN (.+)")
_ERROR = re.compile(r"([\w.]*(?:Error|Exception): .+|[\w.]+Error$)")
_CONSEQUENCE = re.compile(r"[Cc]onnection (?:closed|reset) by|[Rr]emote process exited")
_WITHOUT_P2P = (
    "where it works with NCCL_P2P_DISABLE=1 before the command, P2P is at fault: IOMMU or ACS, in the firmware"
)
_BY_HAND = "`NCCL_DEBUG=INFO` before the job's command shows the rest"


def _title(tried: AllReduce) -> str:
    within, *others = tried.hosts
    where = f"GPUs of {' and '.join(tried.hosts)}" if others else f"GPU 0 and 1 of {within}"
    return f"an all-reduce over NCCL between {where}"


def _failure(tried: AllReduce) -> Finding:
    about, error = About(Cause.GPU, *tried.hosts), first_error(tried.output)
    if tried.error == NO_ANSWER and not error:
        between = f"NCCL takes ports that the kernel gives; {_BY_HAND}"
        return about.problem(f"{_title(tried)} has not ended in time", between if tried.hosts[1:] else _WITHOUT_P2P)
    return about.problem(f"{_title(tried)} fails: {error or tried.error}", _BY_HAND)


def first_error(output: str) -> str:
    """Return NCCL's first warning, else the first error of a rank; empty without one.

    What a rank says about the end of another one counts only where nothing else is said.
    """
    lines = [line.strip() for line in output.splitlines()]
    for some in ([line for line in lines if not _CONSEQUENCE.search(line)], lines):
        for pattern in (_WARNING, _ERROR):
            if match := next(filter(None, map(pattern.search, some)), None):
                return match[1]
    return ""
