"""One process on the concatenated batch, written out: what every strategy has to equal."""

from __future__ import annotations

import copy
import hashlib

import torch
from torch import Tensor, nn

from trainer.data.loader import InMemory
from trainer.data.shard_plan import permutation
from trainer.models.sharded import gather


def tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """Return what 20 steps in another order of summation may differ by; the reference is computed on the CPU."""
    if dtype == torch.float64:
        return 1e-12
    return 1e-6 if device.type == "cpu" else 1e-5  # a GPU has other algorithms and other functions than the CPU


def make_data(samples: int, dtype: torch.dtype = torch.float64) -> InMemory:
    """Small images and classes that depend on them; the same on every rank."""
    generator = torch.Generator().manual_seed(samples)
    images = torch.randn(samples, 1, 6, 6, generator=generator, dtype=torch.float64)
    labels = (images.flatten(1)[:, :4] * torch.arange(1.0, 5.0, dtype=torch.float64)).argmax(1)
    return InMemory(images.to(dtype), labels)


def make_model(dtype: torch.dtype = torch.float64, *, seed: int = 1, batch_norm: bool = False) -> nn.Module:
    """A convolution and two linear layers, with BatchNorm where asked for."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Conv2d(1, 3, 3)]
        layers += [nn.BatchNorm2d(3)] if batch_norm else []
        layers += [nn.Tanh(), nn.Flatten(), nn.Linear(48, 8)]
        layers += [nn.BatchNorm1d(8)] if batch_norm else []
        layers += [nn.Tanh(), nn.Linear(8, 4)]
        return nn.Sequential(*layers).to(dtype)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train_alone(
    model: nn.Module, data: InMemory, *, batch: int, epochs: int = 1, clip_norm: float | None = None
) -> nn.Module:
    """Plain PyTorch over the same permutation: the next `batch` samples in every step, the rest in the last."""
    model = copy.deepcopy(model)
    optimizer = sgd(model)
    for epoch in range(epochs):
        for index in permutation(len(data), epoch=epoch, seed=0).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.inputs[index]), data.targets[index]).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
    return model


def assert_equal(found: nn.Module, expected: nn.Module, tolerance: float) -> None:
    """Each tensor's difference is within `tolerance`, relative to the norm of all of the model's numbers."""
    wanted = expected.state_dict()
    floats = [tensor.double() for tensor in wanted.values() if tensor.is_floating_point()]
    norm = float(torch.cat([tensor.flatten() for tensor in floats]).norm())
    for name, tensor in found.state_dict().items():
        error = float((gather(tensor).cpu().double() - wanted[name].cpu().double()).norm()) / norm
        assert error <= tolerance, f"{name} differs by {error:.2e} of all weights' norm, more than {tolerance:.0e}"


def fingerprint(model: nn.Module) -> str:
    """A hash of every bit of the model's state."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(_bytes(gather(tensor)))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
