"""Checks on a machine with GPUs: `make check-gpu`.

Trains MNIST through Horovod over NCCL and through DistributedDataParallel, on one GPU and on all of them, and
prints one table with the device's name. Fails when a run does, when its accuracy is not MNIST's, or when
Horovod did not use NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from trainer import TrainerError, report_failures
from trainer.launch.processes import run

ROOT = Path(__file__).resolve().parents[1]
TARGET_PERCENT = 99.0
RUN_TIMEOUT_S = 600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="holds MNIST/raw")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="(default: %(default)s)")
    options = parser.parse_args()
    report_failures()
    gpus = _gpus()
    print("\n".join(f"GPU {number}: {name}" for number, name in enumerate(gpus)))
    rows = [
        _train(launcher, ranks, precision, options.data_dir, options.epochs)
        for ranks in sorted({1, len(gpus)})
        for launcher in ("horovodrun", "torchrun")
        for precision in ("fp32", "bf16")
    ]
    _print_table(rows)
    return 0


def _gpus() -> list[str]:
    import torch

    if torch.cuda.device_count() == 0:
        raise TrainerError("this machine shows no GPU to PyTorch; run this where nvidia-smi lists one")
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def _train(launcher: str, ranks: int, precision: str, data_dir: Path, epochs: int) -> dict[str, str]:
    start = {
        "horovodrun": ["horovodrun", "-np", str(ranks), "-H", f"localhost:{ranks}", sys.executable],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", str(ranks)],
    }[launcher]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "run")
        command = [*start, str(ROOT / "examples" / "mnist.py"), "--device", "cuda", "--dataset", "mnist"]
        command += ["--data-dir", str(data_dir), "--epochs", str(epochs), "--precision", precision]
        command += ["--output", str(output), "--target-accuracy", str(TARGET_PERCENT)]
        _say(f"{launcher}, {ranks} GPU{'s' * (ranks > 1)}, {precision}")
        done = run(command, env=os.environ, timeout_s=RUN_TIMEOUT_S)
        if done.problem:
            raise TrainerError(f"{' '.join(command)} failed ({done.problem}):\n{done.stdout[-3000:]}{done.stderr_tail}")
        settings = json.loads((output / "settings.json").read_text())
        records = [json.loads(line) for line in (output / "epochs.jsonl").read_text().splitlines()]
    if "NCCL" not in settings["description"]:
        raise TrainerError(f"the gradients were not all-reduced over NCCL: {settings['description']}")
    seconds = sorted(record["seconds"] for record in records[1:] or records)
    return {
        "strategy": settings["strategy"],
        "GPUs": str(ranks),
        "precision": precision,
        "s/epoch (median, first left out)": f"{seconds[len(seconds) // 2]:.2f}",
        "accuracy": f"{100 * records[-1]['validation']['metrics']['accuracy']:.2f} %",
    }


def _say(text: str) -> None:
    print(f"trainer: {text}", file=sys.stderr, flush=True)


def _print_table(rows: list[dict[str, str]]) -> None:
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    for line in ({name: name for name in widths}, *rows):
        print("  ".join(f"{line[name]:<{width}}" for name, width in widths.items()).rstrip())


if __name__ == "__main__":
    sys.exit(main())
