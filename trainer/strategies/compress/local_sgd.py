"""Local training: ranks train by themselves for some updates, then average their weights, under every strategy.

Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-batches, Use Local SGD" (ICLR 2020, arXiv:1808.07217): post-local
SGD, which begins with synchronous updates. With a compression, what is sent is not the weights but what the round has
changed, Basu et al., "Qsparse-local-SGD" (NeurIPS 2019, arXiv:1906.02367), algorithm 1, here with PowerSGD's error
feedback.
docs/strategies.md has the drawing and the formulas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.config import RunConfig
from trainer.strategies.collectives import Collectives
from trainer.strategies.compress.power_sgd import PowerSGD
from trainer.strategies.compress.whole_gradients import WIRE_TYPES, WholeSynchronizer, exact_type
from trainer.strategies.gradients import NamedParameters
from trainer.watch.heartbeat import WEIGHTS, waits


class LocalSynchronizer(WholeSynchronizer):
    """Averages weights instead of gradients, after each round of updates that every rank takes by itself.

    Args:
        config: `sync_every`, `full_updates` and `compression` are used here.
    """

    def __init__(self, parameters: NamedParameters, ranks: Collectives, config: RunConfig) -> None:
        super().__init__(parameters, ranks)
        self._config, self._wire_type = config, WIRE_TYPES.get(config.compression)
        self._power = PowerSGD(parameters, config.powersgd_rank) if config.powersgd_rank else None
        self._sends_changes = self._wire_type is not None or self._power is not None
        self._anchors = {name: _copy(parameter) for name, parameter in parameters} if self._sends_changes else {}
        """The last weights that all ranks had in common; none where a round sends the weights themselves."""
        self._in_round = 0
        self._states_differ = self._differs = False
        self._is_new = True
        """Whether the next step is the first step of an update."""
        self._has_begun = False
        """Whether a round has begun, so that the anchors are the weights at its beginning."""
        self._was_written_to_between = False
        """Whether the script wrote to this rank's weights before the round; its anchors are these weights."""
        self._trained_at: dict[str, int] = {}
        """By a parameter's name, the last update in which it required a gradient."""
        self._averaged_at = 0
        """The number of the update after which all weights were averaged last."""

    @property
    def _named(self) -> dict[str, nn.Parameter]:
        named = zip(self.names, self.parameters, strict=True)
        return {name: parameter for name, parameter in named if parameter is not None}

    @property
    def weights_are_equal(self) -> bool:
        return self.updates < self._config.full_updates

    @torch.no_grad()
    def complete(self) -> None:
        self._is_new = True
        if self.weights_are_equal:
            self._average()
        elif not self._has_begun:
            self._has_begun = True
            self._take_anchors()
            self._average_anchors()  # changes do not make ranks equal that did not begin so
        elif self._in_round == 0 and self._anchors:
            # What another optimizer has changed since is training, and a part of this round's change.
            self._was_written_to_between = not self._differs and not self._are_at_anchors()
            if self._was_written_to_between:
                self._take_anchors()
        for name, parameter in self._named.items():
            if parameter.requires_grad:
                self._trained_at[name] = self.updates

    def _are_trained(self, names: Sequence[str]) -> list[bool]:
        """Return which parameters have required a gradient in some pass since their last average."""
        # The last update counts where another optimizer has stepped since.
        first = self.updates - min(self._config.sync_every, max(self.updates - self._averaged_at, 1))
        return [self._trained_at.get(name, -1) >= first for name in names]

    def _take_anchors(self) -> None:
        """Overwrite the anchors with the present weights."""
        named = self._named
        for name in self._anchors.keys() & named.keys():
            self._anchors[name].copy_(named[name].detach())

    def _are_at_anchors(self) -> bool:
        """Return whether the weights are still the anchors."""
        named = self._named.items()
        return all(torch.equal(parameter, self._anchors[name].to(parameter.dtype)) for name, parameter in named)

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
        if was_synchronous:
            return
        self._in_round, self._states_differ, self._differs = self._in_round + 1, True, True
        if self._in_round == self._config.sync_every:
            with waits(WEIGHTS):
                self._average_round()

    @torch.no_grad()
    def _average_round(self) -> None:
        named = self._named
        if self._anchors:
            self._go_on_by_changes(named)
        else:
            held = [parameter.detach() for parameter in named.values()]
            for parameter, mean in zip(held, self.mean_of_all(held, "weights"), strict=True):
                parameter.copy_(mean)
        self._in_round, self._differs, self._averaged_at = 0, False, self.updates

    def _go_on_by_changes(self, named: Mapping[str, nn.Parameter]) -> None:
        """Send what each parameter has changed since the anchor, and move the anchors by the ranks' mean of it.

        A parameter that was freed has changed nothing. It keeps its index: PowerSGD knows tensors by their index.
        """
        names = [*self._anchors]
        changes = [
            anchor - named[name].detach() if name in named else torch.zeros_like(anchor)
            for name, anchor in self._anchors.items()
        ]
        for name, is_trained, mean in zip(names, self._are_trained(names), self._means_of(changes), strict=True):
            if self._power is not None and not is_trained:
                mean.zero_()  # a parameter's error comes with later rounds, but a frozen parameter stays
            anchor = self._anchors[name].sub_(mean)
            if name in named:
                named[name].copy_(anchor)

    def _means_of(self, changes: list[Tensor]) -> list[Tensor]:
        """Return the ranks' means of the changes, which are overwritten.

        Where the script wrote to some rank's weights, make the anchors equal.
        """
        # In the type of the first tensor, with which it is sent.
        written = torch.full((1,), self._was_written_to_between, dtype=changes[0].dtype, device=self._device)
        if self._power is not None:
            [written] = self._power.replace_by_mean(changes, self.mean_of_all, [written])
        else:
            *changes, written = self.mean_of_all([*changes, written], "weights", self._wire_type)
        if bool(written):
            self._average_anchors()
        return changes

    @torch.no_grad()
    def average_weights(self, optimizers: Collection[Optimizer] = ()) -> None:
        with waits(WEIGHTS):
            if self._differs:
                self._average_round()
            if not self._states_differ or not optimizers:
                return
            self._states_differ = False
            named = {id(parameter): name for name, parameter in self._named.items()}
            states = {
                (number, named[id(parameter)], kind): value
                for number, optimizer in enumerate(optimizers)
                for group in optimizer.param_groups
                for parameter in group["params"]
                if id(parameter) in named
                for kind, value in optimizer.state.get(parameter, {}).items()
                if isinstance(value, Tensor)
                and (value.is_floating_point() or value.is_complex())
                and (value.shape, value.device) == (parameter.shape, parameter.device)
            }
            averaged = [states[key] for key in self._keys_of_all_ranks([*states])]
            for value, mean in zip(averaged, self.mean_of_all(averaged, "states"), strict=True):
                value.copy_(mean)

    def _keys_of_all_ranks(self, keys: Sequence[Any]) -> Sequence[Any]:
        """Return the keys that every rank has, in the same order: ranks may have reached different parameters."""
        gathered = self._ranks.all_gather_object(sha256(repr(keys).encode()).digest())
        if len(set(gathered)) == 1:
            return keys
        return sorted(set.intersection(*map(set, self._ranks.all_gather_object(keys))), key=repr)

    def state_dict(self) -> dict[str, Any]:
        power = self._power.state_dict(self.mean_of_all) if self._power is not None else {}
        return {
            "kind": "local",
            "updates": self.updates,
            "anchors": self._anchors if self._has_begun else {},
            "power": power,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._has_begun = self._differs = False
        self._in_round = 0
        if state.get("kind") != "local":
            return
        self.updates = self._averaged_at = state["updates"]
        self._has_begun = bool(state["anchors"]) and not self.weights_are_equal
        self._take_anchors()  # for a parameter that has none there, because it was frozen
        if self._power is not None and state.get("power"):  # of the same compression
            self._power.load_state_dict(state["power"])
        for name, anchor in self._anchors.items():
            if name in state["anchors"] and state["anchors"][name].shape == anchor.shape:
                anchor.copy_(state["anchors"][name])


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().to(exact_type(parameter.dtype), copy=True)
