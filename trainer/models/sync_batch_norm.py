"""BatchNorm over the global batch, for every strategy and device.

PyTorch's SyncBatchNorm needs torch.distributed, Horovod's needs Horovod, and both train on GPUs only. This layer
needs only an all-reduce. It weighs every sample once, however unevenly the ranks share them, and so keeps N ranks equal
to a single process. Ioffe and Szegedy (2015) for the formula; Peng et al., "MegDet" (2018) for statistics across
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.errors import ConfigError, TrainerError

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
AllReduce = Callable[[Tensor], Tensor]


class _Shared:
    """The all-reduce that a model holds: copies of the model share it, and pickled models leave it out."""

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce

    def __call__(self, tensor: Tensor) -> Tensor:
        return self._all_reduce(tensor)

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self

    def __reduce__(self) -> Any:
        return _Shared, (_left_the_job,)


def _left_the_job(tensor: Tensor) -> Tensor:
    raise TrainerError(
        "a model with BatchNorm over the global batch was loaded from a file, without its job; build the model anew, "
        "load its state_dict, and prepare it"
    )


class _SumOverRanks(torch.autograd.Function):
    """Differentiable all-reduce: the gradient of a sum over ranks is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layer: GlobalBatchNorm) -> Tensor:
        ctx.layer = layer
        return layer.all_reduce(tensor.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0] if ctx.layer.is_weighed else torch.zeros_like(gradients[0])
        # Through the function again: with `create_graph`, this sum has a gradient, too.
        return _SumOverRanks.apply(gradient, ctx.layer), None


class GlobalBatchNorm(_BatchNorm):
    """BatchNorm over inputs of shape (samples, channels, ...), by the statistics of all ranks' samples.

    In training mode the forward and the backward pass are collective. The sums are kept in two passes (mean
    first, then squared distances from it), which stays accurate where a mean is large beside its spread.
    """

    all_reduce: AllReduce
    counts = True
    """Whether this rank's samples count; False while it computes on a padding batch."""
    is_weighed = True
    """Whether this rank's loss counts; False while its backward pass has the weight 0, and may be NaN."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            normalized: Tensor = super().forward(input)
            return normalized
        weight = 1.0 if self.counts else 0.0
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims = [0, *range(2, x.dim())]
        shape = [1, -1] + [1] * (x.dim() - 2)
        values = torch.full_like(x[0, :1].reshape(-1)[:1], weight * x.numel() / x.shape[1])
        sums = self._sum(torch.cat([x.sum(dims) * weight, values]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = x - mean.view(shape)
        variance = self._sum(centred.square().sum(dims) * weight) / count
        self._update_running_statistics(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        out = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape)
        if self.bias is not None:
            out = out + self.bias.view(shape)
        return out.to(input.dtype)

    def _sum(self, tensor: Tensor) -> Tensor:
        total: Tensor = _SumOverRanks.apply(tensor, self)
        return total

    def _update_running_statistics(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), momentum)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of 2 or more dimensions, not {input.dim()}")


def leave_out_gradients(layers: Iterable[_BatchNorm], weightless: bool) -> None:
    """Have the layers send zeros instead of this rank's gradients in backward passes, or stop doing so."""
    for layer in layers:
        if isinstance(layer, GlobalBatchNorm):
            layer.is_weighed = not weightless


def leave_out(layers: Iterable[_BatchNorm], padding: bool) -> None:
    """Leave the next batches out of the layers' statistics because they are padding, or stop doing so."""
    for layer in layers:
        if isinstance(layer, GlobalBatchNorm):
            layer.counts = not padding
        elif padding:
            _MOMENTUM.setdefault(layer, layer.momentum)
            layer.momentum = 0.0
        elif layer in _MOMENTUM:
            layer.momentum = _MOMENTUM.pop(layer)


_MOMENTUM: MutableMapping[nn.Module, float | None] = WeakKeyDictionary()


def convert_sync_batch_norm(model: nn.Module, all_reduce: AllReduce) -> nn.Module:
    """Replace every BatchNorm by a `GlobalBatchNorm` that holds the same parameters and buffers; return the model.

    Raises:
        ConfigError: a layer is a subclass of BatchNorm, which may do more than BatchNorm.
    """
    converted: dict[nn.Module, GlobalBatchNorm] = {}
    for parent in list(model.modules()):
        # Not named_children, which lists a layer that is used twice only once.
        for name, child in parent._modules.items():
            if isinstance(child, _BatchNorm) and not isinstance(child, GlobalBatchNorm):
                if type(child) not in _PLAIN:
                    raise ConfigError(
                        f"sync_batch_norm cannot replace {type(child).__name__}, which may do more than "
                        f"BatchNorm; valid are {', '.join(kind.__name__ for kind in _PLAIN)}"
                    )
                parent._modules[name] = converted.setdefault(child, _convert(child, all_reduce))
    if isinstance(model, _BatchNorm) and not isinstance(model, GlobalBatchNorm):
        return _convert(model, all_reduce)
    return model


def _convert(layer: _BatchNorm, all_reduce: AllReduce) -> GlobalBatchNorm:
    global_layer = GlobalBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
    )
    # The very same tensors, so that an optimizer that was made before still trains them.
    global_layer._parameters, global_layer._buffers = layer._parameters, layer._buffers
    global_layer.training = layer.training
    global_layer.all_reduce = _Shared(all_reduce)
    return global_layer
