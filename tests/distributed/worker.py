"""One rank of a job that runs a module's checks; see `harness.run_checks`."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from tests.distributed.harness import MARK


def dump_stacks_before_the_deadline(rank: int) -> None:
    """Leaves this rank's stack where the harness finds it, shortly before the job would be killed."""
    path = Path(os.environ[MARK], f"stack-{rank}")
    faulthandler.dump_traceback_later(float(os.environ["TRAINER_TEST_STACKS_AFTER_S"]), file=path.open("w"))


def main() -> int:
    from trainer.config import TrainerConfig
    from trainer.launch.environment import read_launch
    from trainer.preparation import join

    module, name, folder = sys.argv[1:]
    rank = read_launch().rank
    dump_stacks_before_the_deadline(rank)
    strategy = join(name, TrainerConfig(device="cpu"))
    checks = {name: item for name, item in vars(importlib.import_module(module)).items() if name.startswith("check_")}
    with Path(folder, f"rank-{rank}.jsonl").open("w") as report:
        for name, check in checks.items():
            outcome = "passed"
            try:
                check(strategy)
            except Exception:
                outcome = traceback.format_exc()
            report.write(json.dumps({"check": name, "outcome": outcome}) + "\n")
            report.flush()
            if outcome != "passed":
                # The other ranks may wait for this one in a collective: leave, so that the launcher ends them.
                os._exit(1)
    strategy.barrier()
    faulthandler.cancel_dump_traceback_later()
    strategy.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
