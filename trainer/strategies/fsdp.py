"""Sharding of parameters, gradients and optimizer state by torch's `fully_shard` (FSDP2), for models larger than a GPU.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 3; Zhao et
al., "PyTorch FSDP" (2023).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Optimizer, Rprop
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from trainer.cluster.world import World
from trainer.config import FsdpConfig, RunConfig
from trainer.data.base import NO_SAMPLES, Loader, Observer
from trainer.data.batches import Step
from trainer.errors import ConfigError, TrainerError
from trainer.models.sharded import current, is_sharded, replace_parameter, shard_values
from trainer.strategies.base import broadcast_optimizer_state, check_dense
from trainer.strategies.ddp import DDPStrategy
from trainer.strategies.gradients import NamedParameters, Synchronizer, foreign_pass
from trainer.watch.heartbeat import waits

_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}
# These optimizers need whole vectors or matrices, or operations that DTensor does not have.
_NOT_SHARDED = (LBFGS, Rprop, Adafactor)


class FSDPStrategy(DDPStrategy):
    """Each rank keeps a part of every parameter; whole blocks are gathered for their forward and backward passes.

    Raises:
        ConfigError: this PyTorch is older than 2.13, the first in which a rank may lack some gradients.
    """

    name = "fully_shard"
    shards = True

    def __init__(self, world: World) -> None:
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                f"strategy 'fsdp' needs PyTorch 2.13 or newer, and this is {torch.__version__}; strategies 'ddp' and "
                "'horovod' train with it"
            )
        super().__init__(world)
        self._meshes: dict[str | int, DeviceMesh] = {}
        self._passes = EvaluationPasses()
        self._order_group: Any = None
        self._agreeing: tuple[Any, Tensor, int] | None = None
        """What `agree` waits for, the ranks' numbers, and this rank's."""
        self._parts = ["another collective"]
        """Names of what is gathered separately, in the order of `prepare`; the first stands for other collectives."""

    def agree(self, part: int = 0) -> None:
        """Compare the number of the part that is gathered next, or 0 for another collective. Collective.

        Ranks that gather different parts would mix up their parameters, or wait for ever. On GPUs, which gather behind
        the back of this process, it does not wait: what differs is told at the next call.

        Raises:
            TrainerError: a rank comes to another part than rank 0; on all ranks.
        """
        # Of its own, in which no unlike messages meet.
        self._order_group = self._order_group or dist.new_group(backend="gloo")
        self._compare_parts()
        numbers = torch.empty(self.world.size, dtype=torch.int64)
        work = dist.all_gather_single(numbers, torch.tensor([part]), group=self._order_group, async_op=True)
        self._agreeing = work, numbers, part
        if self.world.device.type == "cpu":
            self._compare_parts()

    def _compare_parts(self) -> None:
        """Wait for the last `agree`, and raise `TrainerError` where it has found a difference."""
        if self._agreeing is None:
            return
        (work, numbers, part), self._agreeing = self._agreeing, None
        with waits(self._parts[part], counts=True):
            work.wait()
        if other := next((rank for rank, number in enumerate(numbers) if number != numbers[0]), 0):
            first, second = self._parts[numbers[0]], self._parts[numbers[other]]
            raise TrainerError(
                f"rank 0 calls {first} where rank {other} calls {second}, and under strategy 'fsdp' all ranks call the "
                "same blocks and collectives in the same order; where a model leaves blocks out, name those that each "
                "rank always calls, as FsdpConfig(blocks=(…))"
            )

    def prepare(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        self.check(config)
        if config.compression == "bf16" and config.fsdp.reduce_dtype is None:
            config = replace(config, fsdp=replace(config.fsdp, reduce_dtype="bf16"))
        if isinstance(model, FSDPModule):
            if getattr(model, "_trainer_fsdp", None) != (config.fsdp, config.compile):
                raise ConfigError("the model was sharded before, by fully_shard or with other settings; make it anew")
        else:
            self._shard(model, config)
        self.broadcast_tensors(model.buffers())
        sums_elsewhere = bool(config.fsdp.parameter_dtype or config.fsdp.reduce_dtype)
        synchronizer = FSDPSynchronizer(model, self._passes, sums_elsewhere=sums_elsewhere)
        # The model owns it: the two refer to each other, and the run must keep neither.
        object.__setattr__(model, "_trainer_synchronizer", synchronizer)
        return synchronizer

    def check(self, config: RunConfig) -> None:
        if config.low_communication_setting and self.world.size > 1:
            setting = config.low_communication_setting
            raise ConfigError(f"{setting}, and under FSDP no rank has whole gradients; valid there is none")
        if config.compression not in ("none", "bf16"):
            raise ConfigError(
                f"compression is {config.compression!r}, which strategy 'fsdp' does not have; valid there: none, bf16"
            )
        if config.fsdp.cpu_offload and self.world.device.type != "cuda":
            raise ConfigError("fsdp's cpu_offload keeps parameters off a GPU, and the device is the CPU; leave it out")

    def _shard(self, model: nn.Module, config: RunConfig) -> None:
        settings = config.fsdp
        blocks = find_blocks(model, settings.blocks)
        check_model(model, blocks, settings)
        mesh = self._mesh(settings.shard_over)
        reduce = settings.reduce_dtype or ("fp32" if settings.parameter_dtype else None)
        precision = MixedPrecisionPolicy(param_dtype=_DTYPES[settings.parameter_dtype], reduce_dtype=_DTYPES[reduce])
        offload = CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy()
        names = {module: name for name, module in model.named_modules()}
        for part in (*blocks, model):
            self._move_to_device(part)
            if part is not model and settings.checkpoint_activations:
                part.forward = partial(checkpoint, part.forward, use_reentrant=False)
            if config.compile:
                part.compile()
            before = _parameters(part)
            for parameter in before.values():
                if not parameter.numel():  # nothing to train, and fully_shard cannot reduce a gradient without numbers
                    parameter.requires_grad_(False)
            # Resharded after the forward pass in any case, so that a model is whole within a pass only.
            fully_shard(part, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=True)
            part.set_custom_all_gather(_AgreedGather(partial(self.agree, len(self._parts))))  # type: ignore[operator]
            self._parts.append(names[part] or "the rest of the model")
            part.unshard()  # type: ignore[operator]  # for what it keeps of it, which inference mode would spoil
            part.reshard()  # type: ignore[operator]
            after = _parameters(part)
            for name, parameter in before.items():
                if after[name] is not parameter:
                    replace_parameter(parameter, after[name], f"{names[part]}.{name}".lstrip("."))
        model._trainer_fsdp = (settings, config.compile)  # type: ignore[assignment]

    def _move_to_device(self, part: nn.Module) -> None:
        """Move tensors that are not sharded yet to the device, with rank 0's values; a whole part has to fit there."""
        for tensor in chain(part.parameters(), part.buffers()):
            if not is_sharded(tensor):
                tensor.data = tensor.data.to(self.world.device)
        with torch.no_grad():
            self.broadcast_tensors(parameter.data for parameter in part.parameters() if not is_sharded(parameter))

    def _mesh(self, over: str | int) -> DeviceMesh:
        if over not in self._meshes:
            size = self._shard_size(over)
            copies = {"replicate": self.world.size // size} if size < self.world.size else {}
            shape, kind = {**copies, "shard": size}, self.world.device.type
            self._meshes[over] = init_device_mesh(kind, tuple(shape.values()), mesh_dim_names=tuple(shape))
        return self._meshes[over]

    def _shard_size(self, over: str | int) -> int:
        """Return how many ranks share a copy of the model."""
        if over == "all":
            return self.world.size
        if over == "host":
            hosts = self.all_gather_object(self.world.host)
            counts = Counter(hosts)
            runs = sum(host != following for host, following in pairwise(hosts)) + 1
            if len(set(counts.values())) > 1 or runs > len(counts):
                raise ConfigError(
                    "fsdp's shard_over is 'host', which takes as many ranks on each host, next to one another; the "
                    f"hosts have {', '.join(f'{host}: {count}' for host, count in counts.items())}"
                )
            return counts[hosts[0]]
        if self.world.size % int(over):
            raise ConfigError(
                f"fsdp's shard_over is {over}, and there are {self.world.size} ranks; it has to divide them"
            )
        return int(over)

    def follow_loader(self, loader: Loader) -> None:
        loader.observers.append(self._passes)

    def adopt(self, optimizer: Optimizer) -> None:
        is_fused = isinstance(optimizer, SGD | Adagrad) and any(group["fused"] for group in optimizer.param_groups)
        if is_fused or isinstance(optimizer, _NOT_SHARDED):
            raise ConfigError(
                f"{type(optimizer).__name__}{'(fused=True)' * is_fused} does not work on sharded parameters; strategy "
                "'fsdp' takes optimizers that treat each number by itself, such as AdamW, and SGD if it is not fused"
            )
        if not any(is_sharded(value) for state in optimizer.state.values() for value in state.values()):
            broadcast_optimizer_state(self, optimizer)
        for group in optimizer.param_groups:
            group["params"] = current(group["params"])
        for old in [*optimizer.state]:
            if (new := current(old)) is not old:
                optimizer.state[new] = shard_values(optimizer.state.pop(old), new)


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


@dataclass(frozen=True)
class _AgreedGather:
    """The all-gather of a part of the model, to which all ranks have to come at the same time."""

    agree: Callable[[], None]
    allocate = staticmethod(torch.empty)

    def __call__(self, **options: Any) -> Any:
        self.agree()
        return dist.all_gather_single(**options)


class EvaluationPasses(Observer):
    """The forward passes of an evaluation step, which ranks without samples repeat, as gathering is collective."""

    def __init__(self) -> None:
        self.known: list[FSDPModule] = []
        """The parts of the model that was prepared last, in its order; repeated if no pass was seen."""
        self._seen: list[FSDPModule] = []
        self._is_in_step = False

    def evaluated(self, loader: Loader, step: Step | None) -> None:
        """Note the passes that follow; on a rank without samples, repeat those of the step before.

        To repeat a pass is to gather the same parameters in the same order, for which the other ranks wait.
        """
        if step is not NO_SAMPLES:
            self._seen, self._is_in_step = [], step is not None
            return
        for part in self._seen if self._is_in_step else self.known:
            part.unshard()
            part.reshard()
        self._is_in_step = False

    def add(self, part: FSDPModule) -> None:
        """Note a pass of a part. A pass with gradients ends the evaluation."""
        self._is_in_step = self._is_in_step and not torch.is_grad_enabled()
        if self._is_in_step:
            self._seen.append(part)


class FSDPSynchronizer(Synchronizer):
    """`fully_shard`, whose backward pass leaves on each rank its part of the mean gradient.

    A local backward pass leaves whole gradients of this rank, which nobody can read, and to which the next pass adds.
    The smallest parameter then gets a gradient of zeros as a mark: if it is gone, somebody has dropped the gradients.

    Args:
        model: as `fully_shard` has left it.
        passes: told of each forward pass of a part.
        sums_elsewhere: whether such gradients are added up in another type than the parameters'.
    """

    def __init__(self, model: nn.Module, passes: EvaluationPasses, *, sums_elsewhere: bool) -> None:
        super().__init__()
        self._passes = passes
        self._sums_elsewhere = sums_elsewhere
        self._root = cast(FSDPModule, model)
        parts: dict[Any, str] = {part: path for path, part in model.named_modules() if isinstance(part, FSDPModule)}
        self._gathered = {
            part: [
                (path, module, path.rpartition(".")[2])
                for prefix, module in part.named_modules(parts.keys() - {part}, root)
                for path, _ in module.named_parameters(prefix, recurse=False)
            ]
            for part, root in parts.items()
        }
        """The parts that are gathered separately, in the model's order, each with its parameters: path in the model,
        module, and name in the module."""
        passes.known = list(self._gathered)
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._is_local = self._is_weightless = self._is_running = self._is_in_pass = False
        # Names of parameters that a backward pass has reached since the last step.
        self._reached: set[str] = set()
        self._mark: tuple[nn.Parameter, Tensor, int] | None = None
        # Whole parameters by id, which the modules have within a pass only.
        self._watched: dict[int, nn.Parameter] = {}
        # Hooks outlive a synchronizer that was replaced by another, unless they are removed.
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(_calls(self._before_forward), prepend=True),
            *(cast(nn.Module, part).register_forward_pre_hook(_calls(self._on_part, part)) for part in self._gathered),
        ]
        self._root.set_requires_gradient_sync(True)
        # A parameter without a gradient on some rank sends zeros there: each rank sends as much as the others.
        self._root.set_reduce_scatter_unused_params(True)

    def retire(self) -> None:
        for handle in self._handles:
            handle.remove()

    def before_backward(self, *, is_local: bool = False, is_weightless: bool = False) -> None:
        if is_local is not self._is_local:
            self._root.set_requires_gradient_sync(not is_local)
        self._is_local, self._is_weightless, self._is_in_pass = is_local, is_weightless, True
        if self._mark_is_gone():
            raise TrainerError(
                "gradients of passes within no_sync were dropped between a forward and its backward pass; call "
                "zero_grad before the forward pass"
            )

    def after_backward(self) -> None:
        self._is_in_pass = self._is_running = False
        self._mark = None
        if self._is_local and self._trained:
            smallest = min(self._trained.values(), key=lambda parameter: parameter.numel())
            gradient = smallest.grad if smallest.grad is not None else torch.zeros_like(smallest)
            smallest.grad = gradient
            self._mark = (smallest, gradient, gradient._version)

    def before_step(self) -> None:
        if self._mark is not None and not self._mark_is_gone():
            raise TrainerError(
                "the last backward pass before a step ran within no_sync, and strategy 'fsdp' sums gradients in a "
                "backward pass only; leave no_sync for the last one"
            )
        absent = [(name, parameter) for name, parameter in self._trained.items() if name not in self._reached]
        if self._reached and absent:
            others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise TrainerError(
                f"parameter {absent[0][0]}{others} got no gradient from backward, and strategy 'fsdp' needs one of "
                "every parameter in each step; freeze what is not trained (requires_grad_(False)) and call run.prepare "
                "afterwards, or take another strategy"
            )
        self._reached.clear()

    def _mark_is_gone(self) -> bool:
        if self._mark is None:
            return False
        parameter, gradient, version = self._mark
        return parameter.grad is not gradient or gradient._version != version

    def _before_forward(self, *_: Any) -> None:
        # What an error in a pass has left, or gradients of this rank that zero_grad does not reach.
        if not self._is_running and not self._mark_is_gone():
            return
        if self._mark is not None and self._sums_elsewhere:
            raise TrainerError(
                "gradients of passes within no_sync were dropped, or a pass after them has failed, which "
                "parameter_dtype and reduce_dtype do not allow for; step after each update, or leave these settings out"
            )
        if self._mark is not None:
            self._mark[0].grad = None  # so that an update that goes on is told of it
        for parameter in self._watched.values():
            parameter.grad = None
        self._is_running, self._mark = False, None
        self._reached.clear()
        self._root.reset_iter_state()

    def _on_part(self, part: FSDPModule, *_: Any) -> None:
        """Watch the gradients of a part's whole parameters, which its modules have within a pass only."""
        self._passes.add(part)
        if not torch.is_grad_enabled():
            return
        for path, module, name in self._gathered[part]:
            parameter = getattr(module, name)
            if parameter.requires_grad and id(parameter) not in self._watched:  # they are the same in each pass
                self._watched[id(parameter)] = parameter
                self._handles.append(parameter.register_hook(_calls(self._on_parameter_gradient, path)))

    def _on_parameter_gradient(self, path: str, gradient: Tensor) -> Tensor | None:
        if not self._is_in_pass:
            raise foreign_pass()
        self._is_running = True
        self._reached.add(path)
        return torch.zeros_like(gradient) if self._is_weightless else None


def _calls(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Return a hook that calls a method while its object lives, and does not keep the object alive."""
    weak = weakref.WeakMethod(method)

    def hook(*rest: Any) -> Any:
        bound = weak()
        return bound(*first, *rest) if bound is not None else None

    return hook


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, names: str | tuple[str, ...]) -> list[nn.Module]:
    """Return the blocks of a model, in the model's order; none of them is part of another.

    Args:
        names: see `FsdpConfig.blocks`.

    Raises:
        ConfigError: no module has a class of that name, or its class is called by nobody.
    """
    if names == "auto":
        return _topmost(model, _is_repeated)
    blocks = _topmost(model, lambda _, child: type(child).__name__ in names)
    valid = {type(module).__name__ for module in model.modules() if module is not model}
    if missing := sorted(set(names) - valid):
        raise ConfigError(
            f"fsdp's blocks has {missing[0]!r}; valid are the model's classes, {', '.join(sorted(valid))}"
        )
    for block in blocks:
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise ConfigError(f"fsdp's blocks has {type(block).__name__!r}, which has no forward; name what it holds")
    return blocks


def _topmost(module: nn.Module, is_block: Callable[[nn.Module, nn.Module], bool]) -> list[nn.Module]:
    """Return the blocks within a module that are not within another block; `is_block` takes a parent and its child."""
    parts = ([child] if is_block(module, child) else _topmost(child, is_block) for child in module.children())
    return list(dict.fromkeys(chain.from_iterable(parts)))


def _is_repeated(parent: nn.Module, child: nn.Module) -> bool:
    """Return whether a container has several children of the child's class that have parameters."""
    if not isinstance(parent, _CONTAINERS) or isinstance(child, _CONTAINERS):
        return False
    alike = [sibling for sibling in parent.children() if type(sibling) is type(child)]
    return sum(next(sibling.parameters(), None) is not None for sibling in alike) > 1


def check_model(model: nn.Module, blocks: Sequence[nn.Module], config: FsdpConfig) -> None:
    """Raise `ConfigError` for a model that cannot be sharded, or cannot be with these settings."""
    check_dense(model, "strategy 'fsdp' exchanges")
    if config.checkpoint_activations:
        if not blocks:
            raise ConfigError("fsdp's checkpoint_activations computes blocks again, and there are none; name blocks")
        if any(isinstance(module, _BatchNorm) for block in blocks for module in block.modules()):
            raise ConfigError(
                "fsdp's checkpoint_activations computes blocks again, and a BatchNorm in one would count each batch "
                "twice; leave it out, or name blocks without BatchNorm"
            )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(f"parameter {name} is a scalar, which strategy 'fsdp' cannot shard; give it shape (1,)")
        if not parameter.is_contiguous():
            raise ConfigError(
                f"parameter {name} is not contiguous, and strategy 'fsdp' cuts rows; leave out to(memory_format=…) and "
                "take channels_last of the batches"
            )
        if parameter.is_meta:
            raise ConfigError(f"parameter {name} is on the meta device, and has no values; make the model on the CPU")
    _check_groups(model, blocks)


def _check_groups(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Check that each parameter belongs to a single group (a block, or the rest), and each group has a single type."""
    owner: dict[nn.Parameter, str] = {}
    names = {module: name for name, module in model.named_modules()}
    groups = {names[block]: block.modules() for block in blocks}
    # Including parts of a block that are reached elsewhere without the block.
    groups["the rest of the model"] = (module for _, module in model.named_modules(memo=set(blocks)))
    for group, modules in groups.items():
        kinds = set()
        for module in modules:
            for name, parameter in module.named_parameters(recurse=False):
                if owner.setdefault(parameter, group) != group:
                    raise ConfigError(
                        f"parameter {name} of {group} is one of {owner[parameter]} as well, and both are gathered at "
                        "different times; name other blocks, or blocks=() for one group"
                    )
                kinds.add(str(parameter.dtype).removeprefix("torch."))
        if len(kinds) > 1:
            raise ConfigError(f"parameters of {group} are {' and '.join(sorted(kinds))}; a block's have one type")
