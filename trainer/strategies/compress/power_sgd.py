"""PowerSGD: gradients are sent as products of two narrow matrices; docs/strategies.md has the drawing and the formula.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(NeurIPS 2019, arXiv:1905.13727), algorithms 1 and 2: a step of a power iteration for each update, which begins with
the last update's factor (warm start), and error feedback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.strategies.collectives import Collectives
from trainer.strategies.compress.whole_gradients import WholeSynchronizer, exact_type
from trainer.strategies.gradients import NamedParameters

_LEAST_SAVING = 2.0
"""A gradient whose factors are not smaller by this factor is sent as it is; PyTorch's hook has the same default."""


class Factors:
    """The approximation of a parameter's gradient, as the matrix of n = its first dimension by m = all others.

    Args:
        number: of the parameter; the random numbers that it begins with depend on it, and not on the rank.
        rank: of the approximation, at most min(n, m).
    """

    def __init__(self, parameter: Tensor, rank: int, number: int) -> None:
        self.shape = (parameter.shape[0], parameter.numel() // parameter.shape[0])
        options = {"dtype": exact_type(parameter.dtype), "device": parameter.device}
        self.error: Tensor = torch.zeros(self.shape, **options)  # type: ignore[call-overload]
        """The part of this rank's gradients that no update has had yet, n × m."""
        self.right: Tensor = torch.empty((self.shape[1], rank), **options)  # type: ignore[call-overload]
        """The factor that the next update begins with, m × rank; the same on all ranks."""
        self._kept: Tensor | None = None
        self._left = torch.empty(0)
        self._number = number
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all earlier gradients."""
        generator = torch.Generator().manual_seed(self._number)
        self.right.copy_(torch.randn(self.right.shape, generator=generator, dtype=torch.float64))
        self.error.zero_()

    def keep(self) -> None:
        """Remember the error, for `drop`."""
        self._kept = self.error.clone() if self._kept is None else self._kept.copy_(self.error)

    def drop(self) -> None:
        """Restore the error that `keep` remembered last; zeros if there is none."""
        self.error.copy_(self._kept if self._kept is not None else torch.zeros_like(self.error))

    def project(self, gradient: Tensor) -> Tensor:
        """Add this rank's gradient to the error; return the product with the right factor, n × rank."""
        self.error += gradient.reshape(self.shape)
        # The narrow factor comes first here and below, where MKL takes twelve times as long for error.T @ left.
        basis: Tensor = torch.linalg.qr(self.right).Q
        return (basis.T @ self.error.T).T

    def project_back(self, left: Tensor) -> Tensor:
        """Return this rank's right factor for the mean of `project`, m × rank. The rest is the new error."""
        # QR and not a division by the norm: a column of zeros, from a gradient of zeros, stays a direction.
        self._left = torch.linalg.qr(left).Q
        right: Tensor = self._left.T @ self.error
        self.error.addmm_(self._left, right, alpha=-1)
        return right.T

    def approximate(self, right: Tensor, gradient: Tensor) -> None:
        """Write the mean gradient's approximation, from the mean of `project_back`, over this rank's gradient."""
        self.right = right
        if gradient.is_contiguous() and gradient.dtype == right.dtype:
            torch.mm(self._left, right.T, out=gradient.view(self.shape))
        else:
            gradient.copy_((self._left @ right.T).view(gradient.shape))


Mean = Callable[[Sequence[Tensor], str], list[Tensor]]
"""`WholeSynchronizer.mean_of_all`."""


class PowerSGD:
    """Repeatedly computes the mean over all ranks of a set of tensors, in two messages.

    The first message has all left factors and the tensors that are small already, the second all right factors. Each
    rank keeps the difference between its tensors and their factors (the error), and adds it to the next tensors. The
    factors are linear in the tensors, so only the mean of all ranks' errors matters to them. A checkpoint keeps that
    mean, from which any number of ranks goes on.

    Args:
        parameters: in the shapes of the tensors.
        rank: of the approximations; the wider, the closer.
        least_saving: a tensor is sent whole unless its factors are smaller by more than this factor.
    """

    def __init__(self, parameters: NamedParameters, rank: int, least_saving: float = _LEAST_SAVING) -> None:
        self._names = [name for name, _ in parameters]
        widths = [_width(parameter, rank, least_saving) for _, parameter in parameters]
        self.factors = {
            index: Factors(parameters[index][1].detach(), width, index) for index, width in enumerate(widths) if width
        }
        """The factors, by the index of the tensor that they stand for."""

    def replace_by_mean(
        self, tensors: Sequence[Tensor], mean_of_all: Mean, beside: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Overwrite the tensors with their approximate means. Collective.

        Returns:
            The means of what was sent whole beside them.
        """
        whole = [index for index in range(len(tensors)) if index not in self.factors]
        sent = [factors.project(tensors[index]) for index, factors in self.factors.items()]
        means = mean_of_all([*sent, *(tensors[index] for index in whole), *beside], "left")
        lefts, others = means[: len(sent)], means[len(sent) :]
        for index, mean in zip(whole, others[: len(whole)], strict=True):
            tensors[index].copy_(mean)
        if all(bool(left.isfinite().all()) for left in lefts):  # the same on all ranks
            sent = [factors.project_back(left) for factors, left in zip(self.factors.values(), lefts, strict=True)]
            rights = mean_of_all(sent, "right")
            for (index, factors), right in zip(self.factors.items(), rights, strict=True):
                factors.approximate(right, tensors[index])
        else:
            self._begin_anew(tensors)
        return others[len(whole) :]

    def _begin_anew(self, tensors: Sequence[Tensor]) -> None:
        """Make tensors that overflowed on some rank NaN on all, and keep them out of the errors."""
        for index, factors in self.factors.items():
            tensors[index].fill_(torch.nan)
            factors.begin_anew()

    def state_dict(self, mean_of_all: Mean) -> dict[str, Any]:
        """Return the mean error and the factors. Every rank goes on with the mean error, as it would after a load."""
        errors = mean_of_all([factors.error for factors in self.factors.values()], "error")
        for factors, mean in zip(self.factors.values(), errors, strict=True):
            factors.error.copy_(mean)
        kept = {self._names[index]: factors for index, factors in self.factors.items()}
        return {
            "errors": {name: factors.error for name, factors in kept.items()},
            "factors": {name: factors.right for name, factors in kept.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a state, as far as it is of the same rank of approximation and of the same tensors."""
        for index, factors in self.factors.items():
            name = self._names[index]
            errors, rights = state["errors"], state["factors"]
            for tensor, saved in ((factors.error, errors.get(name)), (factors.right, rights.get(name))):
                if saved is not None and saved.shape == tensor.shape:
                    tensor.copy_(saved)


class PowerSGDSynchronizer(WholeSynchronizer):
    """Replaces the gradients by their approximate means.

    A script may drop gradients: a critic's, of a pass that trains its generator. What the errors have of them is
    dropped too, so that steps add up to the gradients that they were for. The copy that this takes is made from the
    first time on.

    Args:
        rank, least_saving: as for `PowerSGD`.
        full_updates: the first so many updates send whole gradients.
    """

    def __init__(
        self,
        parameters: NamedParameters,
        ranks: Collectives,
        *,
        rank: int,
        full_updates: int = 0,
        least_saving: float = _LEAST_SAVING,
    ) -> None:
        super().__init__(parameters, ranks)
        self._full_updates = full_updates
        self._power = PowerSGD(parameters, rank, least_saving)
        self._has_stepped = self._keeps = False
        self._is_applied = True
        """Whether a step has followed the last pass."""

    def before_backward(self, *, is_local: bool = False, is_weightless: bool = False) -> None:
        super().before_backward(is_local=is_local, is_weightless=is_weightless)
        # Where no prepared optimizer steps, as in updates by hand, nothing tells that a gradient was applied.
        if self._is_applied or not self._has_stepped:
            return
        parameters = self.parameters
        for index, factors in self._power.factors.items():
            parameter = parameters[index]
            if parameter is not None and (parameter.grad is None or not bool(parameter.grad.any())):
                factors.drop()
                self._keeps = True

    def after_step(self) -> None:
        self._is_applied = self._has_stepped = True

    def _replace_by_mean(self, gradients: Sequence[Tensor]) -> Tensor:
        if self.updates < self._full_updates:
            return super()._replace_by_mean(gradients)
        if self._keeps and self._is_applied:
            for factors in self._power.factors.values():
                factors.keep()
        self._is_applied = False
        [counts] = self._power.replace_by_mean(gradients, self.mean_of_all, [self.has_gradients()])
        for index, factors in self._power.factors.items():
            # Nobody applies what no rank's pass has reached. Where some gradient overflowed, there is nothing to keep.
            if not counts[index] and bool(gradients[index].isfinite().all()):
                factors.error += gradients[index].reshape(factors.shape)
        return counts

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "powersgd", "updates": self.updates, **self._power.state_dict(self.mean_of_all)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("kind") == "powersgd":
            self.updates = state["updates"]
            self._power.load_state_dict(state)


def _width(parameter: Tensor, rank: int, least_saving: float) -> int:
    """Return the width of a parameter's factors; 0 if its gradient is sent whole, as complex gradients are."""
    if parameter.dim() < 2 or parameter.numel() == 0 or parameter.is_complex():
        return 0
    rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
    width = min(rank, rows, columns)
    return width if (rows + columns) * width * least_saving < rows * columns else 0
