"""Backward pass check: notices a pass that is not the handle's, before a gradient is all-reduced in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from trainer.errors import TrainerError


class Backward(Protocol):
    """What knows whether a backward pass is the handle's."""

    is_in_backward: bool


def foreign_backward_check(updates: Backward) -> Callable[[], None]:
    """Return a hook for gradients that raises `TrainerError` in a backward pass which is not the handle's."""
    # Weakly, because Python cannot collect a cycle that goes through a hook of the autograd graph.
    own = weakref.ref(updates)

    def check() -> None:
        updates = own()
        if updates is not None and not updates.is_in_backward:
            raise TrainerError(
                "loss.backward() neither weighs the batch nor waits for gradients that are on their way; call "
                "run.backward(loss) instead"
            )

    return check


def watch_gradients(parameters: Sequence[nn.Parameter], on_gradient: Callable[[], None]) -> Callable[[], None]:
    """Call `on_gradient` before a gradient is added to any of these, and so before a strategy's own hooks.

    Returns:
        What removes the hooks.
    """
    nodes: list[Any] = [parameter.view_as(parameter).grad_fn for parameter in parameters]
    nodes = [node.next_functions[0][0] for node in nodes]
    hooks = [node.register_prehook(lambda _: on_gradient()) for node in nodes]

    def remove() -> None:
        for hook in hooks:
            hook.remove()
        nodes.clear()  # which live as long as they are kept here

    return remove
