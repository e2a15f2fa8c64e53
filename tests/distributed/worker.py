"""One rank of a job that runs checks; see `harness.run_checks`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import pytest

from tests.distributed.harness import leave_stacks_on_request


def main() -> int:
    import torch

    from examples.strategies import full_name
    from trainer.cluster.environment import read_launch
    from trainer.config import TrainerConfig
    from trainer.loop.joining import join

    name, device, folder, *checks = sys.argv[1:]
    rank = read_launch().rank
    leave_stacks_on_request(rank)
    # References are computed in full precision, and some are compared bit for bit.
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    strategy = join(full_name(name), TrainerConfig(device=device))
    with Path(folder, f"rank-{rank}.jsonl").open("w") as report:
        for check in checks:
            module, function = check.split(":")
            outcome = "passed"
            try:
                getattr(importlib.import_module(module), function)(strategy)
            except (Exception, pytest.fail.Exception):  # the latter is what pytest.raises ends with
                outcome = traceback.format_exc()
            report.write(json.dumps({"check": function, "outcome": outcome}) + "\n")
            report.flush()
            if outcome != "passed":
                # The other ranks may wait for this one in a collective: leave, so that the launcher ends them.
                os._exit(1)
    if not checks[-1].startswith("tests.distributed.checks_ending:"):
        strategy.barrier()
        strategy.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
