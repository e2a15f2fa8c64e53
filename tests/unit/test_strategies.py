"""Strategies by name: which one a name and a launcher stand for, and what each says when it cannot be had."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from examples.strategies import STRATEGIES
from trainer import ConfigError, World
from trainer.config import RunConfig
from trainer.strategies import NAMES, choose_strategy, make_strategy
from trainer.strategies.base import Strategy, broadcast_optimizer_state
from trainer.strategies.gradients import NamedParameters, Synchronizer
from trainer.strategies.single import SingleStrategy

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


@pytest.mark.parametrize("name", [name for name in NAMES if name != "auto"])
@pytest.mark.parametrize("launcher", ["python", "mpirun", "torchrun"])
def test_a_name_stands_for_itself_whatever_the_launcher(name: str, launcher: str) -> None:
    assert choose_strategy(name, World(launcher=launcher)) == name


def test_single_refuses_several_ranks() -> None:
    with pytest.raises(ConfigError, match="strategy 'single' trains alone, but mpirun started 2 ranks"):
        make_strategy("single", TWO)


def test_single_is_a_world_of_one() -> None:
    strategy = make_strategy("auto", World())
    assert isinstance(strategy, SingleStrategy)
    model = nn.Linear(2, 1)
    assert type(strategy.prepare(model, list(model.named_parameters()), RunConfig())) is Synchronizer
    assert strategy.wrap(model) is model
    tensor = torch.tensor([1.0, 2.0])
    assert strategy.all_reduce(tensor) is tensor
    assert strategy.broadcast(tensor) is tensor
    assert tensor.tolist() == [1.0, 2.0]
    assert strategy.broadcast_object({"a": 1}) == {"a": 1}
    assert strategy.all_gather_object("mine") == ["mine"]
    assert strategy.tuning == {"tuned": "1"}
    assert "rank 0 of 1" in strategy.description
    strategy.barrier()
    strategy.close()
    strategy.close()


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


def test_data_parallel_wraps_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    strategy = make_strategy(STRATEGIES["data_parallel"], World(device=torch.device("cuda", 0)))
    assert strategy.description.startswith("DataParallel over 2 GPUs, rank 0 of 1")
    model = nn.Linear(2, 1)
    wrapped = strategy.wrap(model)
    assert isinstance(wrapped, nn.DataParallel)
    assert wrapped.module is model
    with pytest.raises(ConfigError, match="each of whose GPUs normalizes its own part"):
        strategy.check(RunConfig(sync_batch_norm=True))


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


@pytest.mark.parametrize(("mpi", "transport"), [(True, "MPI"), (False, "Gloo")])
def test_horovod_joins_and_says_over_what(monkeypatch: pytest.MonkeyPatch, mpi: bool, transport: str) -> None:
    module = Horovod(mpi=mpi)
    install(monkeypatch, module)
    strategy = make_strategy("auto", TWO)
    assert strategy.description.startswith(f"Horovod over {transport}, rank 0 of 2 on ")
    assert strategy.tuning == {"tuned": "2"}
    strategy.close()
    strategy.close()
    assert len(module.calls) == 2, "one start and one shutdown"


def test_horovod_that_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(
        ConfigError, match=r"strategy 'horovod' needs Horovod .*`python scripts/install/build_horovod.py`"
    ):
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


class OneOfTwo(Strategy):
    """A rank of two whose broadcasts add what the test says the other has, and that receives rank 0's objects."""

    def __init__(self, rank: int, theirs: Any) -> None:
        super().__init__(World(rank=rank, size=2))
        self._theirs = theirs

    def prepare(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        return Synchronizer()

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor.add_(self._theirs)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return value if root == self.world.rank else self._theirs

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return


def test_sharing_buffers_gives_rank_0s_running_statistics() -> None:
    layer = nn.BatchNorm1d(2)
    OneOfTwo(1, 3).broadcast_buffers(layer)
    assert layer.running_mean is not None
    assert layer.running_mean.tolist() == [3.0, 3.0]
    assert layer.weight.tolist() == [1.0, 1.0], "a parameter is no buffer"


def stepped(momentum: float = 0.9) -> tuple[nn.Module, SGD]:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=momentum)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_rank_0s_optimizer_state_replaces_another_ranks() -> None:
    _, root = stepped()
    model = nn.Linear(2, 1)
    mine = SGD(model.parameters(), lr=0.1, momentum=0.9)
    broadcast_optimizer_state(OneOfTwo(1, root.state_dict()["state"]), mine)
    assert mine.state_dict()["state"][0]["momentum_buffer"].tolist() == [[1.0, 1.0]]


def test_a_fresh_optimizer_on_rank_0_changes_no_ranks_state() -> None:
    # Horovod's own would make it step on zero gradients, which weight decay and Adam feel.
    model = nn.Linear(2, 1)
    before = model.weight.clone()
    mine = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    broadcast_optimizer_state(OneOfTwo(1, {}), mine)
    broadcast_optimizer_state(OneOfTwo(0, None), mine)
    assert mine.state_dict()["state"] == {}
    assert torch.equal(model.weight, before)
