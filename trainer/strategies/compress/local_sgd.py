"""Local training: ranks train by themselves for some updates, then average their weights, under every strategy.

Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-batches, Use Local SGD" (ICLR 2020, arXiv:1808.07217): post-local
SGD, which begins with synchronous updates. Douillard et al., "DiLoCo: Distributed Low-Communication Training of
Language Models" (2023, arXiv:2311.08105), algorithm 1: the change that the average makes is the gradient of an outer
optimizer. Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed
Averaging" (2020, arXiv:2006.00441): the weights are sent while the next updates are computed, and what these have
changed is added to the average. With a compression, what is sent is not the weights but what the round has changed,
Basu et al., "Qsparse-local-SGD" (NeurIPS 2019, arXiv:1906.02367), algorithm 1, here with PowerSGD's error feedback.
docs/strategies.md has the drawing and the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.config import RunConfig
from trainer.strategies.collectives import Collectives
from trainer.strategies.compress.power_sgd import PowerSGD
from trainer.strategies.compress.whole_gradients import WIRE_TYPES, WholeSynchronizer, exact_type
from trainer.strategies.gradients import NamedParameters


@dataclass(frozen=True)
class _Sent:
    """Weights that were sent, and whose mean has not been taken yet."""

    here: dict[str, Tensor]
    """This rank's weights, as they were sent."""
    means: Callable[[], dict[str, Tensor]]
    """Waits for the exchange; returns the mean over all ranks of each, or of its change."""


class LocalSynchronizer(WholeSynchronizer):
    """Averages weights in place of gradients, after each round of updates that every rank takes by itself.

    With `outer_lr`, ranks go on from a step of an outer optimizer instead of the average itself: of SGD with Nesterov
    momentum (Sutskever et al. 2013), as torch.optim.SGD computes it.

    Args:
        config: `sync_every`, `full_updates`, `compression`, `sync_overlap`, `outer_lr` and `outer_momentum` are used
            here.
    """

    def __init__(self, parameters: NamedParameters, ranks: Collectives, config: RunConfig) -> None:
        super().__init__(parameters, ranks)
        self._config, self._wire_type = config, WIRE_TYPES.get(config.compression)
        self._power = PowerSGD(parameters, config.powersgd_rank) if config.powersgd_rank else None
        self._in_round = 0
        self._states_differ = self._differs = False
        self._sent: _Sent | None = None
        self._is_new = True
        """Whether the next step is the first one of an update."""
        self._anchors: dict[str, Tensor] = {}
        self._velocities: dict[str, Tensor] = {}
        self._has_begun = False
        """Whether a round has begun since this was made, so that the anchors are those of its beginning."""
        self._was_written_to_between = False
        """Whether the script wrote to this rank's weights before the round began, which its anchors are, then."""
        self._frozen: set[str] = set()
        """Parameters that no longer required a gradient when the round began."""
        if config.outer_lr is not None or self._sends_changes:
            self._anchors = {name: _copy(parameter) for name, parameter in parameters}
        if config.outer_lr is not None:
            self._velocities = {name: torch.zeros_like(anchor) for name, anchor in self._anchors.items()}

    @property
    def _sends_changes(self) -> bool:
        """Whether a round's end sends what the round has changed, which loses less by a compression than weights do."""
        return self._wire_type is not None or self._power is not None

    @property
    def _named(self) -> dict[str, nn.Parameter]:
        named = zip(self.names, self.parameters, strict=True)
        return {name: parameter for name, parameter in named if parameter is not None}

    @property
    def weights_are_equal(self) -> bool:
        return self.updates < self._config.full_updates

    def _complete(self) -> None:
        self._is_new = True
        if self.weights_are_equal:
            self._average()
        elif not self._has_begun:
            self._has_begun = True
            self._take_anchors()
            if self._sends_changes:  # which would not make ranks equal that did not begin so
                self._average_anchors()
        elif self._in_round == 0 and self._sends_changes and not self._config.sync_overlap:
            # What another optimizer has changed since is training, and a part of this round's change.
            self._was_written_to_between = not self._differs and not self._are_as_anchors()
            if self._was_written_to_between:
                self._take_anchors()
        if self._in_round == 0:
            self._frozen = {name for name, parameter in self._named.items() if not parameter.requires_grad}

    def _are_as_anchors(self) -> bool:
        named = self._named.items()
        return all(torch.equal(parameter, self._anchors[name].to(parameter.dtype)) for name, parameter in named)

    def _take_anchors(self) -> None:
        parameters = self._named
        for name in self._anchors.keys() & parameters.keys():
            self._anchors[name].copy_(parameters[name].detach())

    def _average_anchors(self) -> None:
        anchors = [*self._anchors.values()]
        for anchor, mean in zip(anchors, self.mean_of_all(anchors, "anchors"), strict=True):
            anchor.copy_(mean)

    def after_step(self) -> None:
        if not self._is_new:  # another optimizer's step on the same gradients
            self._differs = self._has_begun
            return
        self._is_new = False
        was_synchronous, self.updates = self.weights_are_equal, self.updates + 1
        if not was_synchronous:
            self._in_round, self._states_differ, self._differs = self._in_round + 1, True, True
            if self._in_round == self._config.sync_every:
                self._end_round()

    @torch.no_grad()
    def _end_round(self) -> None:
        if not self._config.sync_overlap:
            self._average_weights()
            return
        self._take_average()
        self._in_round, self._differs = 0, False
        here, sent = {name: _copy(parameter) for name, parameter in self._named.items()}, self._to_send()
        names, wait = [*sent], self.start_mean([*sent.values()], "weights", self._wire_type)
        self._sent = _Sent(here, lambda: dict(zip(names, wait(), strict=True)))  # without keeping what was sent

    def _take_average(self) -> None:
        """Go on from the average of the weights that were sent, and from what this rank has changed since."""
        if self._sent is None:
            return
        sent, self._sent = self._sent, None
        means = sent.means()
        for name, parameter in self._named.items():
            parameter.copy_(self._go_on_from(name, means[name]) + (parameter - sent.here[name]))

    def _was_written_to(self, sent: _Sent) -> bool:
        """Return whether somebody has changed the weights since they were sent, on any rank: a clamp, say."""
        named = self._named.items()
        changed = any(
            not torch.equal(parameter.to(sent.here[name].dtype), sent.here[name]) for name, parameter in named
        )
        return bool(self._ranks.all_reduce(torch.tensor(float(changed), device=self._device)))

    def _average_weights(self) -> None:
        self._in_round, self._differs = 0, False
        sent, parameters = self._to_send(), self._named
        tensors = [*sent.values()]
        means = self._mean_of_changes(tensors) if self._sends_changes else self.mean_of_all(tensors, "weights")
        for name, mean in zip(sent, means, strict=True):
            if name in parameters:
                parameters[name].copy_(self._go_on_from(name, mean))

    def _mean_of_changes(self, changes: list[Tensor]) -> list[Tensor]:
        """Return the changes' compressed means. Where the script wrote to some rank's weights, make anchors equal."""
        # In the type of the first change, with which it is sent.
        written = torch.full((1,), self._was_written_to_between, dtype=changes[0].dtype, device=self._device)
        if self._power is not None:
            [written] = self._power.replace_by_mean(changes, self.mean_of_all, [written])
        else:
            *changes, written = self.mean_of_all([*changes, written], "weights", self._wire_type)
        if bool(written):
            self._average_anchors()
        # What powersgd still has of a parameter comes with later rounds, but not to one that is frozen.
        return [
            torch.zeros_like(change) if name in self._frozen else change
            for name, change in zip(self._anchors, changes, strict=True)
        ]

    def _to_send(self) -> dict[str, Tensor]:
        parameters = self._named
        if not self._sends_changes:
            return {name: parameter.detach() for name, parameter in parameters.items()}
        # One that was freed has its place, too: PowerSGD knows tensors by theirs.
        return {
            name: anchor - parameters[name].detach() if name in parameters else torch.zeros_like(anchor)
            for name, anchor in self._anchors.items()
        }

    def _go_on_from(self, name: str, mean: Tensor) -> Tensor:
        """Return the weights after a round, from the ranks' mean of what was sent, in place of the anchors if any."""
        rate, momentum = self._config.outer_lr, self._config.outer_momentum
        if not self._anchors:
            return mean
        anchor = self._anchors[name]
        change = mean if self._sends_changes else anchor - mean
        if rate is None:
            return anchor.sub_(change)
        velocity = self._velocities[name]
        velocity.mul_(momentum).add_(change)
        return anchor.sub_(change.add_(velocity, alpha=momentum), alpha=rate)

    @torch.no_grad()
    def settle(self, optimizers: Collection[Optimizer] = ()) -> None:
        if self._sent is not None:
            self._differs = self._differs or self._was_written_to(self._sent)
            self._take_average()
        if self._differs:
            self._average_weights()
        if not self._states_differ or not optimizers:
            return
        self._states_differ = False
        trained = set(map(id, self._named.values()))
        states = [
            value
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in trained
            for value in optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and (value.shape, value.device) == (parameter.shape, parameter.device)
        ]
        for value, mean in zip(states, self.mean_of_all(states, "states"), strict=True):
            value.copy_(mean)

    def state_dict(self) -> dict[str, Any]:
        anchors = self._anchors if self._has_begun else {}
        power = self._power.state_dict(self.mean_of_all) if self._power is not None else {}
        return {
            "kind": "local",
            "updates": self.updates,
            "anchors": anchors,
            "velocities": self._velocities,
            "power": power,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._has_begun = self._differs = False
        self._in_round = 0
        if self._sent is not None:  # the weights that it belongs to are gone
            self._sent.means()
            self._sent = None
        if state.get("kind") != "local":
            return
        self.updates, self._has_begun = state["updates"], bool(state["anchors"])
        self._take_anchors()  # for a parameter that has none there, because it was frozen
        if self._power is not None and state.get("power"):  # of the same compression
            self._power.load_state_dict(state["power"])
        for tensors, saved in ((self._anchors, state["anchors"]), (self._velocities, state["velocities"])):
            for name, tensor in tensors.items():
                if name in saved and saved[name].shape == tensor.shape:
                    tensor.copy_(saved[name])


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().to(exact_type(parameter.dtype), copy=True)
