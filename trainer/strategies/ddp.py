"""Gradient synchronization by torch's DistributedDataParallel, over NCCL between GPUs and Gloo between CPUs."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.config import RunConfig
from trainer.errors import ConfigError, TrainerError
from trainer.launch.world import World
from trainer.strategies.base import NamedParameters, Synchronizer
from trainer.strategies.flat import Transport, mean_of_all
from trainer.strategies.gradient_guard import GradientGuard, without_gradient
from trainer.strategies.process_group import ProcessGroupStrategy


class DDPStrategy(ProcessGroupStrategy):
    """DistributedDataParallel over torch.distributed."""

    name = "DistributedDataParallel"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._wrapped: DistributedDataParallel | None = None
        self._seconds_before = 0.0

    def prepare(self, model: nn.Module, parameters: NamedParameters, config: RunConfig) -> Synchronizer:
        if config.reduction == "adasum":
            raise ConfigError("reduction is 'adasum', which strategy 'ddp' does not have; valid there is average")
        if not any(parameter.requires_grad for parameter in model.parameters()):  # which DDP would refuse
            self.broadcast_tensors(tensor.data for tensor in (*model.parameters(), *model.buffers()))
            return Synchronizer(model)
        # Buffers are broadcast before an evaluation, not in every forward pass.
        wrapped = _TransparentDDP(
            model,
            device_ids=[self.world.device] if self.world.device.type == "cuda" else None,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=config.dynamic_graph,
        )
        if config.compression == "fp16":
            wrapped.register_comm_hook(None, fp16_compress_hook)
        wrapped.watched = parameters
        self._wrapped = wrapped
        guard = GradientGuard(parameters, ranks_may_differ=config.dynamic_graph)
        transport = Transport(
            send=self.send_gradients, start=self.start_gradients, all_reduce=self.all_reduce, ranks=self.world.size
        )
        return DDPSynchronizer(wrapped, parameters, guard, transport)

    def exchange_seconds(self) -> float | None:
        # DDP times every hundredth iteration unless it is told to time each; its mean is over those it has timed.
        if self._wrapped is None:
            return None
        self._wrapped._set_ddp_runtime_logging_sample_rate(1)
        seen = self._wrapped._get_ddp_logging_data()
        seconds = float(seen.get("avg_backward_comm_time") or 0) / 1e9 * float(seen.get("iteration") or 0)
        since, self._seconds_before = seconds - self._seconds_before, seconds
        return since


class DDPSynchronizer(Synchronizer):
    """DistributedDataParallel, whose backward pass returns when the gradients are the mean.

    That holds for a forward pass through the wrapper. Gradients of any other one (a method of the model that calls its
    layers, a pass within `no_sync`) are all-reduced before the step.
    """

    forward: DistributedDataParallel

    def __init__(
        self, wrapped: DistributedDataParallel, parameters: NamedParameters, guard: GradientGuard, transport: Transport
    ) -> None:
        super().__init__(wrapped)
        self._parameters = [parameter for _, parameter in parameters]
        self._guard, self._transport = guard, transport
        self._is_exchanging = self._is_local = self._is_new = False
        self.retire = wrapped.reducer._remove_autograd_hooks
        wrapped.register_forward_pre_hook(self._on_forward)

    def keep_local(self, local: bool) -> None:
        # What DDP's own no_sync does, without a context: the loader knows when an update ends, not a block of code.
        self.forward.require_backward_grad_sync = not local

    def after_backward(self) -> None:
        self._is_local = not self._is_exchanging
        self._is_exchanging, self._is_new = False, True

    def finish(self) -> None:
        if not self._is_new:
            return
        self._is_new = False
        self._guard.check_absent()
        if self._is_local:
            self._all_reduce_gradients()

    def _all_reduce_gradients(self) -> None:
        absent = self._guard.absent()
        if len(absent) == len(self._parameters) and not self._guard.ranks_may_differ:
            return
        for _, parameter in absent:
            parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        for gradient, mean in zip(gradients, mean_of_all(gradients, self._transport, "whole"), strict=True):
            gradient.copy_(mean)
        if self._guard.ranks_may_differ:
            self._guard.drop_absent(absent, self._transport.all_reduce)

    def _on_forward(self, *_: Any) -> None:
        if self.forward.require_backward_grad_sync and torch.is_grad_enabled():
            self._is_exchanging = True


def _loaded(model: nn.Module) -> nn.Module:
    return model


class _TransparentDDP(DistributedDataParallel):
    """DDP with the names and the attributes of the model inside: a checkpoint is the same under every strategy.

    So are copies and files of the whole model, which are of the model inside.
    """

    watched: NamedParameters = ()
    """The parameters whose gradients are all-reduced."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        try:
            return super().forward(*inputs, **options)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # Where zero_grad leaves zeros, it is DDP alone that sees the parameters without a gradient.
            found = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
            if found is None:
                raise
            raise TrainerError(without_gradient([self.watched[int(place)] for place in found[1].split()])) from None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]

    def __len__(self) -> int:
        return len(self.module)

    def __bool__(self) -> bool:  # which torch.compile asks, also where the model has no length
        return True

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _loaded, (self.module,)

    def __iter__(self) -> Any:
        return iter(self.module)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_buffers(*args, **kwargs)
