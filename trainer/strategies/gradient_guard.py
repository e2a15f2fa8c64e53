"""Gradients that are changed while they are being all-reduced, and parameters that have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trainer.errors import TrainerError
from trainer.strategies.base import NamedParameters


class GradientGuard:
    """Notices gradients that are changed while they are being all-reduced, and parameters that have none.

    Args:
        parameters: those whose gradients are all-reduced.
        ranks_may_differ: whether a parameter may be without a gradient, also on some ranks only.
    """

    def __init__(self, parameters: NamedParameters, *, ranks_may_differ: bool) -> None:
        self.ranks_may_differ = ranks_may_differ
        self._parameters = parameters
        self._seen: list[tuple[str, nn.Parameter, Tensor, int]] = []

    def note(self) -> None:
        """Note the gradients as they are. PyTorch counts the changes of each tensor."""
        self._seen = [(name, p, p.grad, p.grad._version) for name, p in self._parameters if p.grad is not None]

    def check(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients were dropped since, as `zero_grad()` does.

        Raises:
            TrainerError: a gradient was changed or replaced.
        """
        for name, parameter, gradient, version in self._seen:
            if parameter.grad is not None and (parameter.grad is not gradient or gradient._version != version):
                raise TrainerError(
                    f"the gradient of {name} was changed between backward and step, while it was being all-reduced; "
                    "call run.clip_grad_norm_ to clip, or run.synchronize first, or zero_grad(set_to_none=True)"
                )
        dropped = [parameter for _, parameter, _, _ in self._seen if parameter.grad is None]
        self._seen = []
        return dropped

    def complete(
        self,
        wait: Callable[[Sequence[nn.Parameter]], object],
        all_reduce: Callable[[Tensor], Tensor],
        *,
        between_passes: bool = False,
    ) -> None:
        """Wait for the gradients, and leave those of dropped and absent parameters out. Collective.

        Args:
            wait: makes the gradients the mean over all ranks; is given the parameters whose gradients were dropped.
            all_reduce: sums a tensor over all ranks, in place.
            between_passes: a further pass of the same step follows, which may reach what this one has left out.

        Raises:
            TrainerError: see `check` and `check_absent`.
        """
        if not between_passes:
            self.check_absent()
        absent = self.absent()
        dropped = self.check()
        wait(dropped)
        for parameter in dropped:
            parameter.grad = None
        if between_passes or self.ranks_may_differ:
            self.drop_absent(absent, all_reduce)

    def absent(self) -> NamedParameters:
        """Return the parameters that have no gradient, and had none when the gradients were noted."""
        if len(self._seen) == len(self._parameters):
            return []
        seen = {parameter for _, parameter, _, _ in self._seen}
        return [(name, one) for name, one in self._parameters if one.grad is None and one not in seen]

    def check_absent(self) -> None:
        """Refuse a step in which only a part of the parameters has a gradient, unless the ranks may differ.

        A rank without any takes part in the all-reduce: another one may have them.

        Raises:
            TrainerError: a part of the parameters has none.
        """
        absent = [] if self.ranks_may_differ else self.absent()
        if absent and len(absent) < len(self._parameters):
            raise TrainerError(without_gradient(absent))

    def drop_absent(self, absent: NamedParameters, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """Take the gradient of zeros from the parameters that have got none on any rank, as on a single rank.

        Weight decay and momentum would move them. Collective.
        """
        here = {parameter for _, parameter in absent}
        device = self._parameters[0][1].device
        counts = all_reduce(torch.tensor([float(one not in here) for _, one in self._parameters], device=device))
        for (_, parameter), count in zip(self._parameters, counts.tolist(), strict=True):
            if count == 0:
                parameter.grad = None


def without_gradient(absent: NamedParameters) -> str:
    """Return the line for parameters that have got no gradient."""
    others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
    return (
        f"parameter {absent[0][0]}{others} got no gradient from backward; freeze what is not trained "
        "(requires_grad_(False)) and call run.prepare afterwards, or set dynamic_graph=True where a step may leave "
        "parameters out"
    )
