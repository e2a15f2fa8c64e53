"""The strategies of the texts on distributed training, for comparison: each a `trainer.Strategy` of one's own."""

from __future__ import annotations

STRATEGIES = {
    "ring": "examples.strategies.ring:RingStrategy",
    "parameter_server": "examples.strategies.parameter_server.strategy:ParameterServerStrategy",
    "data_parallel": "examples.strategies.data_parallel:DataParallelStrategy",
}
"""Short names of the classes, for the options of examples and scripts."""


def full_name(name: str) -> str:
    """Return what `trainer.init` takes for a name on a command line, which may be one of `STRATEGIES`."""
    return STRATEGIES.get(name, name)
