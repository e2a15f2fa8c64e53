"""Local training: ranks train by themselves for some updates, then average their weights, under every strategy.

Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-batches, Use Local SGD" (ICLR 2020, arXiv:1808.07217): post-local
SGD, which begins with synchronous updates. Douillard et al., "DiLoCo: Distributed Low-Communication Training of
Language Models" (2023, arXiv:2311.08105), algorithm 1: the change that the average makes is the gradient of an outer
optimizer.
docs/strategies.md has the drawing and the formulas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.strategies.base import NamedParameters, Synchronizer
from trainer.strategies.flat import Transport, exact_type, mean_of_all
from trainer.strategies.gradient_guard import GradientGuard
from trainer.strategies.whole_gradients import WholeSynchronizer


@dataclass(frozen=True, kw_only=True)
class Outer:
    """The outer optimizer: SGD with Nesterov momentum (Sutskever et al. 2013), as torch.optim.SGD computes it."""

    lr: float
    momentum: float


class LocalSynchronizer(Synchronizer):
    """Averages weights in place of gradients, after each round of updates that every rank takes by itself.

    Args:
        every: updates of a round.
        full_updates: the first so many updates are synchronous ones.
        outer: takes a step with the average; without one, the average itself is what the ranks go on from.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: NamedParameters,
        guard: GradientGuard,
        transport: Transport,
        *,
        every: int,
        full_updates: int = 0,
        outer: Outer | None = None,
    ) -> None:
        super().__init__(model)
        self._parameters, self._transport = dict(parameters), transport
        self._guard = guard
        self._whole = WholeSynchronizer(model, parameters, guard, transport)
        self._every, self._full_updates, self._outer = every, full_updates, outer
        self.updates = self._in_round = 0
        self._states_differ = self._differs = False
        self._is_new = True
        """Whether the next step is the first one of an update."""
        self._anchors: dict[str, Tensor] = {}
        self._velocities: dict[str, Tensor] = {}
        self._has_begun = False
        """Whether a round has begun since this was made, so that the anchors are those of its beginning."""
        if outer is not None:
            self._anchors = {name: _copy(parameter) for name, parameter in parameters}
            self._velocities = {name: torch.zeros_like(anchor) for name, anchor in self._anchors.items()}

    @property
    def _is_synchronous(self) -> bool:
        return self.updates < self._full_updates

    def keep_local(self, local: bool) -> None:
        self._whole.keep_local(local)

    def before_backward(self) -> None:
        self._is_new = True
        if self._is_synchronous:
            self._whole.before_backward()

    def after_backward(self) -> None:
        if self._is_synchronous:
            self._whole.after_backward()
        else:
            self._guard.note()

    def finish(self) -> None:
        if self._is_synchronous:
            self._whole.finish()
        else:
            self._guard.check_absent()
            if self._is_new and not self._has_begun:
                self._has_begun = True
                self._take_anchors()

    def _take_anchors(self) -> None:
        for name, anchor in self._anchors.items():
            anchor.copy_(self._parameters[name].detach())

    def reopen(self) -> None:
        self._is_new = True  # also on a rank without a backward pass: its rounds are as long as the others'
        self._whole.reopen()

    def after_step(self) -> None:
        if not self._is_new:  # another optimizer's step on the same gradients
            self._differs = self._has_begun
            return
        self._is_new = False
        was_synchronous, self.updates = self._is_synchronous, self.updates + 1
        if not was_synchronous:
            self._in_round, self._states_differ, self._differs = self._in_round + 1, True, True
            if self._in_round == self._every:
                self._average()

    @torch.no_grad()
    def _average(self) -> None:
        self._in_round, self._differs = 0, False
        means = mean_of_all([*self._parameters.values()], self._transport, "weights")
        for (name, parameter), mean in zip(self._parameters.items(), means, strict=True):
            parameter.copy_(mean if self._outer is None else self._outer_step(name, mean, self._outer))

    def _outer_step(self, name: str, mean: Tensor, outer: Outer) -> Tensor:
        anchor, velocity = self._anchors[name], self._velocities[name]
        change = anchor - mean
        velocity.mul_(outer.momentum).add_(change)
        return anchor.sub_(change.add_(velocity, alpha=outer.momentum), alpha=outer.lr)

    @torch.no_grad()
    def settle(self, optimizers: Collection[Optimizer] = ()) -> None:
        if self._differs:
            self._average()
        if not self._states_differ or not optimizers:
            return
        self._states_differ = False
        own = {id(parameter) for parameter in self._parameters.values()}
        states = [
            value
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in own
            for value in optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and (value.shape, value.device) == (parameter.shape, parameter.device)
        ]
        for value, mean in zip(states, mean_of_all(states, self._transport, "states"), strict=True):
            value.copy_(mean)

    def state_dict(self) -> dict[str, Any]:
        anchors = self._anchors if self._has_begun else {}
        return {"kind": "local", "updates": self.updates, "anchors": anchors, "velocities": self._velocities}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._has_begun = False
        if state.get("kind") != "local":
            return
        self.updates, self._has_begun = state["updates"], bool(state["anchors"])
        self._take_anchors()  # for a parameter that has none there, because it was frozen
        for own, found in ((self._anchors, state["anchors"]), (self._velocities, state["velocities"])):
            for name, tensor in own.items():
                if name in found and found[name].shape == tensor.shape:
                    tensor.copy_(found[name])


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().to(exact_type(parameter.dtype), copy=True)
