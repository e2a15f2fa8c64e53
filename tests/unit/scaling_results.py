"""Results of a scaling test that was never run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scaling.jobs import Host, Plan
from scaling.models import Link, Network, Shape
from scaling.results import Results
from scaling.runs import Run

SLOW, FAST = (  # 100 Mbit/s, 80 Gbit/s
    Link(((0, 1e-3), (10**9, 1e-3 + 80))),
    Link(((0, 1e-5), (10**9, 1e-5 + 0.1))),
)
PAIR, FOUR = Shape(hosts=2, per_host=1), Shape(hosts=2, per_host=2)
SIZE = 25_000_000


def timing(step: float, samples: int, **changes: Any) -> dict[str, Any]:
    values = {
        "world_size": 1, "hosts": ["a"], "machines": 1, "cores": 2, "threads": 1, "device": "cpu", "strategy": "Single",
        "gradient_bytes": SIZE, "gradient_shapes": [[1250, 1000]] * 5,
        "workers": None, "samples_in_epoch": 60000, "steps": 10, "updates": 10, "samples": samples * 10,
        "seconds": step * 10, "input": 0.0, "compute": 0.1, "exchange": step - 0.1, "waiting": 0.0, "hidden": None,
        "window": 0.0, "own": [0.1], "ranks": [],
    }  # fmt: skip
    return {**values, **changes}


def make_results() -> Results:
    """Return three rounds of 1x1 and of 2x2 under horovod, whose four ranks share two cores."""
    alone = Run(shape=Shape(hosts=1, per_host=1), strategy="single", scaling="alone", round=1, batch=100)
    hosts = [Host(name="a", slots=2), Host(name="<b>", slots=2)]
    plan = Plan(hosts=hosts, script=["x.py"], batch_flag="-b", steps=10, timeout_s=9)
    made = Results(plan=plan, batch=100, command=["scripts/scaling_test.py", "--hosts", "a:2,<b>:2"])
    rounds = ((0.1, [0.05, 0.15]), (0.4, [0.0, 0.9]), (0.1, [0.05, 0.15]))
    made.baselines.alone[100, 1] = [
        replace(alone, round=number, timing=timing(step, 100, own=own)) for number, (step, own) in enumerate(rounds, 1)
    ]
    made.networks["horovod"] = Network(local=FAST, remote=SLOW)
    for number, step in enumerate((2.0, 2.2, 9.0), 1):
        run = Run(shape=FOUR, strategy="horovod", scaling="weak", round=number, batch=100)
        made.runs += [
            Run(shape=alone.shape, strategy="single", scaling="both", round=number, batch=100).ended(
                timing=timing(0.08, 100)
            ),
            run.ended(timing=timing(step, 400, threads=1)),
        ]
    return made
