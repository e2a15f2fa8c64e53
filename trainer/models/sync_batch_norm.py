"""BatchNorm over the global batch, for every strategy and device.

PyTorch's SyncBatchNorm needs torch.distributed, Horovod's needs Horovod, and both train on GPUs only. This layer
needs only an all-reduce. It weighs every sample once, however unevenly the ranks share them, and so keeps N ranks equal
to a single process. Ioffe and Szegedy (2015) for the formula; Peng et al., "MegDet" (2018) for statistics across
devices.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.errors import ConfigError
from trainer.models.global_batch import GlobalBatch

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class GlobalBatchNorm(_BatchNorm):
    """BatchNorm over inputs of shape (samples, channels, ...), by the statistics of all ranks' samples.

    In training mode the forward and the backward pass are collective. The sums are kept in two passes (mean
    first, then squared distances from it), which stays accurate where a mean is large beside its spread.
    """

    batch: GlobalBatch

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            normalized: Tensor = super().forward(input)
            return normalized
        weight = 1.0 if self.batch.counts else 0.0
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims = [0, *range(2, x.dim())]
        shape = [1, -1] + [1] * (x.dim() - 2)
        values = torch.full_like(x[0, :1].reshape(-1)[:1], weight * x.numel() / x.shape[1])
        sums = self.batch.sum(torch.cat([x.sum(dims) * weight, values]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = x - mean.view(shape)
        variance = self.batch.sum(centred.square().sum(dims) * weight) / count
        self._update_running_statistics(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        out = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape)
        if self.bias is not None:
            out = out + self.bias.view(shape)
        return out.to(input.dtype)

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


def convert_sync_batch_norm(model: nn.Module, batch: GlobalBatch) -> nn.Module:
    """Replace every BatchNorm by a `GlobalBatchNorm` that holds the same parameters and buffers; return the model.

    Raises:
        ConfigError: a layer is a subclass of BatchNorm, which may do more than BatchNorm.
    """
    converted: dict[nn.Module, GlobalBatchNorm] = {}
    for path, child in [*model.named_modules(remove_duplicate=False)]:  # with every place of a layer that is used twice
        if isinstance(child, _BatchNorm) and not isinstance(child, GlobalBatchNorm):
            if type(child) not in _PLAIN:
                raise ConfigError(
                    f"sync_batch_norm cannot replace {type(child).__name__}, which may do more than BatchNorm; valid "
                    f"are {', '.join(kind.__name__ for kind in _PLAIN)}"
                )
            layer = converted.setdefault(child, _convert(child, batch))
            if path:
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, layer)
    return converted.get(model, model)


def _convert(layer: _BatchNorm, batch: GlobalBatch) -> GlobalBatchNorm:
    global_layer = GlobalBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
    )
    # The very same tensors, so that an optimizer that was made before still trains them.
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(global_layer, name, getattr(layer, name))
    global_layer.training = layer.training
    global_layer.batch = batch
    return global_layer
