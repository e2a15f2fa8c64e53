"""Sharding of parameters, gradients and optimizer state by torch's `fully_shard` (FSDP2), for models larger than a GPU.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 3; Zhao et
al., "PyTorch FSDP" (2023).
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import chain, pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import LBFGS, Adafactor, Optimizer, Rprop
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from trainer.cluster.world import World
from trainer.config import RunConfig
from trainer.data.base import Loader
from trainer.errors import ConfigError, TrainerError
from trainer.models.sharded import is_sharded, shard_values
from trainer.strategies.base import NamedParameters, Synchronizer, broadcast_optimizer_state
from trainer.strategies.fsdp_blocks import check_model, find_blocks
from trainer.strategies.fsdp_synchronizer import EvaluationPasses, FSDPSynchronizer
from trainer.strategies.process_group import ProcessGroupStrategy

_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}
# They need a whole vector or matrix, or operations that DTensor does not have.
_NOT_SHARDED = (LBFGS, Rprop, Adafactor)


class FSDPStrategy(ProcessGroupStrategy):
    """Each rank keeps a part of every parameter; a block's are gathered for its forward and its backward pass."""

    name = "fully_shard"
    shards = True

    def __init__(self, world: World) -> None:
        super().__init__(world)
        # Parameters of optimizers that were made before `prepare`, and what stands in the model in their place.
        self._replaced: Any = WeakIdKeyDictionary()
        self._meshes: dict[str | int, DeviceMesh] = {}
        self._passes = EvaluationPasses()

    def prepare(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        _check_settings(config, self.world)
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

    def _shard(self, model: nn.Module, config: RunConfig) -> None:
        settings = config.fsdp
        blocks = find_blocks(model, settings.blocks)
        check_model(model, blocks, settings)
        mesh = self._mesh(settings.shard_over)
        reduce = settings.reduce_dtype or ("fp32" if settings.parameter_dtype else None)
        precision = MixedPrecisionPolicy(param_dtype=_DTYPES[settings.parameter_dtype], reduce_dtype=_DTYPES[reduce])
        offload = CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy()
        for part in (*blocks, model):
            self._place(part)
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
            after = _parameters(part)
            for name, parameter in before.items():
                if after[name] is not parameter:
                    self._replaced[parameter] = after[name]
                    if parameter.requires_grad:
                        parameter.register_hook(partial(_refuse, name))
                    parameter.data = parameter.data.new_empty(0)  # who still holds it does not keep the memory
        model._trainer_fsdp = (settings, config.compile)  # type: ignore[assignment]

    def _place(self, part: nn.Module) -> None:
        """Move what is not sharded yet to the device, where all of a part has to fit, with rank 0's values."""
        for tensor in chain(part.parameters(), part.buffers()):
            if not is_sharded(tensor):
                tensor.data = tensor.data.to(self.world.device)
        with torch.no_grad():
            self.broadcast_tensors(one.data for one in part.parameters() if not is_sharded(one))

    def _mesh(self, over: str | int) -> DeviceMesh:
        if over not in self._meshes:
            size, kind = self._shard_size(over), self.world.device.type
            if size == self.world.size:
                self._meshes[over] = init_device_mesh(kind, (size,))
            else:
                names = ("replicate", "shard")
                self._meshes[over] = init_device_mesh(kind, (self.world.size // size, size), mesh_dim_names=names)
        return self._meshes[over]

    def _shard_size(self, over: str | int) -> int:
        """Return how many ranks share one copy of the model.

        Raises:
            ConfigError: the ranks cannot be divided like that.
        """
        if over == "all":
            return self.world.size
        if over == "host":
            hosts = self.all_gather_object(self.world.host)
            counts = Counter(hosts)
            runs = sum(one != other for one, other in pairwise(hosts)) + 1
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

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        return cast(nn.Parameter, self._replaced.get(parameter, parameter))

    def follow_loader(self, loader: Loader) -> None:
        loader.on_own_step = self._on_evaluation_step

    def _on_evaluation_step(self, has_samples: bool) -> None:
        """Where this rank has no samples, take part in the forward passes of the others."""
        if has_samples:
            self._passes.begin_step()
        else:
            self._passes.repeat()

    def adopt(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, _NOT_SHARDED):
            raise ConfigError(
                f"{type(optimizer).__name__} does not work on sharded parameters; strategy 'fsdp' takes optimizers "
                "that treat each number by itself, such as AdamW and SGD"
            )
        held = [one for group in optimizer.param_groups for one in group["params"]]
        if not any(map(is_sharded, held)):
            broadcast_optimizer_state(self, optimizer)
        for group in optimizer.param_groups:
            group["params"] = [self.current(one) for one in group["params"]]
        for old in held:
            new = self.current(old)
            if new is not old and old in optimizer.state:
                optimizer.state[new] = shard_values(optimizer.state.pop(old), new)


def _refuse(name: str, _: object) -> None:
    raise TrainerError(
        f"the loss holds {name} as it was before run.prepare, which has sharded it since; take model.parameters() anew"
    )


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def _check_settings(config: RunConfig, world: World) -> None:
    for name, valid in (("reduction", "average"), ("compression", "none")):
        if (value := getattr(config, name)) != valid:
            raise ConfigError(f"{name} is {value!r}, which strategy 'fsdp' does not have; valid there is {valid}")
    if config.dynamic_graph:
        raise ConfigError(
            "dynamic_graph is True, and strategy 'fsdp' needs a gradient of every parameter in each step; freeze what "
            "is not trained, or take another strategy"
        )
    if config.fsdp.cpu_offload and world.device.type != "cuda":
        raise ConfigError("fsdp's cpu_offload keeps parameters off a GPU, and the device is the CPU; leave it out")
