"""Strategies by name: which one a name and a launcher stand for, and what each says when it cannot be had."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from examples.strategies import STRATEGIES
from trainer import ConfigError, World
from trainer.strategies import choose_strategy, make_strategy

TWO = World(size=2, local_size=2, launcher="mpirun")


@pytest.fixture(autouse=True)
def _leave_the_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tune_host", "tune_open_mpi", "tune_horovod"):
        monkeypatch.setattr(f"trainer.tuning.{name}", lambda world, **_: {"tuned": str(world.size)})


def test_an_unknown_name_is_refused_with_all_valid_ones() -> None:
    with pytest.raises(ConfigError, match="'nope'; valid are auto, single, horovod, ddp, fsdp, and module:Class"):
        make_strategy("nope", World())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("examples.nowhere:Ring", "No module named 'examples.nowhere'"),
        ("examples.strategies.ring:Rings", "has no subclass of trainer.Strategy of that name"),
        ("examples.strategies.ring:Ring", "has no subclass of trainer.Strategy of that name"),
        (":Ring", "valid is module:Class"),
        (".x:Ring", "valid is module:Class"),
    ],
)
def test_a_strategy_of_ones_own_that_is_not_there_is_one_line(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"strategy is '{name}'.*{problem}"):
        make_strategy(name, World())


@pytest.mark.parametrize(
    ("launcher", "size", "expected"),
    [
        ("python", 1, "single"),
        ("torchrun", 2, "ddp"),
        ("torchrun", 1, "ddp"),
        ("horovodrun", 2, "horovod"),
        ("mpirun", 2, "horovod"),
        ("srun", 2, "horovod"),
        # `salloc` or `srun --pty bash`, then plain python: one task, and no MPI that Horovod could start in.
        ("srun", 1, "single"),
    ],
)
def test_auto_chooses_by_the_launcher(launcher: str, size: int, expected: str) -> None:
    assert choose_strategy("auto", World(size=size, local_size=size, launcher=launcher)) == expected


@pytest.mark.distributed
def test_importing_the_library_imports_no_strategys_package() -> None:
    code = "import json, sys, trainer, trainer.strategies; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    imported = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert "torch" in imported
    assert imported.isdisjoint({"horovod", "mpi4py", "sklearn", "torchvision", "tensorboard"})
    assert "trainer.strategies.horovod" not in json.loads(done.stdout)


def test_data_parallel_without_several_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"needs two GPUs or more in one host, .* this one shows 1"):
        make_strategy(STRATEGIES["data_parallel"], World(device=torch.device("cuda", 0)))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="and the device is cpu"):
        make_strategy(STRATEGIES["data_parallel"], World())
    with pytest.raises(ConfigError, match="one process with several GPUs, but mpirun started 2 ranks"):
        make_strategy(STRATEGIES["data_parallel"], TWO)


class Horovod(ModuleType):
    """As much of horovod.torch as joining a job takes."""

    def __init__(self, *, rank: int = 0, size: int = 2, mpi: bool = True, nccl: bool = False) -> None:
        super().__init__("horovod.torch")
        self.init = self.shutdown = lambda: self.calls.append("called")
        self.calls: list[str] = []
        self.rank, self.size = lambda: rank, lambda: size
        self.mpi_enabled, self.nccl_built = lambda: mpi, lambda: nccl


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    package = ModuleType("horovod")
    package.torch = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", module)


def test_horovod_that_is_not_installed_is_named_with_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(ConfigError, match=r"strategy 'horovod' needs Horovod .*docs/install.md"):
        make_strategy("horovod", TWO)


@pytest.mark.parametrize("file", ["horovod.py", "horovod/__init__.py"])
def test_a_file_that_is_imported_in_place_of_horovod_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "horovod", None)  # so that what is imported below is taken away again
    monkeypatch.delitem(sys.modules, "horovod")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as refused:
        make_strategy("horovod", TWO)
    assert str(refused.value) == f"{tmp_path / file} is imported in place of the package horovod; rename it"


def test_horovod_whose_native_library_does_not_load_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ModuleType("horovod.torch"))
    with pytest.raises(ConfigError, match="native library does not load"):
        make_strategy("horovod", TWO)


def test_horovod_without_nccl_is_refused_on_a_gpu_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Horovod(nccl=False)
    install(monkeypatch, module)
    world = World(size=2, local_size=2, launcher="mpirun", device=torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="built without NCCL, but this host has a GPU"):
        make_strategy("horovod", world)
    assert module.calls == []


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (0, 3)])
def test_horovod_that_sees_other_ranks_than_the_launcher_started_is_refused(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    install(monkeypatch, Horovod(rank=rank, size=size))
    with pytest.raises(ConfigError, match=f"this is rank 0 of 2 there, and {rank} of {size} in Horovod"):
        make_strategy("horovod", TWO)
