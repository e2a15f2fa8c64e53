"""A job each of whose ranks writes what it cost to join.

It is started by benchmarks/join.py, with a folder for the ranks' figures.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import trainer
from trainer.cluster.world import current_world


def main(folder: Path) -> None:
    world = current_world("cpu")
    (folder / f"ready-{world.rank}").touch()
    while len(list(folder.glob("ready-*"))) < world.size:  # starting Python and importing PyTorch is no cost of ours
        time.sleep(0.1)
    began, cpu_began = time.monotonic(), time.process_time()
    trainer.init(device="cpu")
    figures = {"join s": time.monotonic() - began, "join CPU s": time.process_time() - cpu_began}
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
