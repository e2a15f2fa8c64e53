"""Check training on a machine with GPUs: `make check-gpu`.

Trains MNIST through Horovod over NCCL and through DistributedDataParallel, on one GPU and on all of them, and prints
the GPUs and a table of the runs. Fails if a run fails, if its accuracy is below 99 %, or if its gradients were not
all-reduced over NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from scaling.report import markdown_table

from trainer import TrainerError, report_failures
from trainer.launch.processes import run

ROOT = Path(__file__).resolve().parents[1]
TARGET_PERCENT = 99.0
RUN_TIMEOUT_S = 600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="contains MNIST/raw (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="of each run (default: %(default)s)")
    options = parser.parse_args()
    report_failures()
    gpus = _gpu_names()
    print("\n".join(f"GPU {number}: {name}" for number, name in enumerate(gpus)))
    rows = [
        _train(launcher, ranks, precision, options.data_dir, options.epochs)
        for ranks in sorted({1, len(gpus)})
        for launcher in ("horovodrun", "torchrun")
        for precision in ("fp32", "bf16")
    ]
    print(markdown_table(list(rows[0]), [list(row.values()) for row in rows]))
    return 0


def _gpu_names() -> list[str]:
    import torch

    if torch.cuda.device_count() == 0:
        raise TrainerError("PyTorch finds no GPU on this machine; run this on one where nvidia-smi lists a GPU")
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def _train(launcher: str, ranks: int, precision: str, data_dir: Path, epochs: int) -> dict[str, str]:
    """Train once and return a row of the table.

    Raises:
        TrainerError: the run failed, or did not use NCCL.
    """
    launch = {
        "horovodrun": ["horovodrun", "-np", str(ranks), "-H", f"localhost:{ranks}", sys.executable],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", str(ranks)],
    }[launcher]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "run")
        command = [*launch, str(ROOT / "examples" / "mnist.py"), "--device", "cuda", "--dataset", "mnist"]
        command += ["--data-dir", str(data_dir), "--epochs", str(epochs), "--precision", precision]
        command += ["--output", str(output), "--target-accuracy", str(TARGET_PERCENT)]
        print(f"trainer: {launcher}, {ranks} GPU{'s' * (ranks > 1)}, {precision}", file=sys.stderr, flush=True)
        done = run(command, env=os.environ, timeout_s=RUN_TIMEOUT_S)
        if done.problem:
            raise TrainerError(f"{' '.join(command)} failed ({done.problem}):\n{done.stdout[-3000:]}{done.stderr_tail}")
        settings = json.loads((output / "settings.json").read_text())
        records = [json.loads(line) for line in (output / "epochs.jsonl").read_text().splitlines()]
    if "NCCL" not in settings["description"]:
        raise TrainerError(f"the gradients were not all-reduced over NCCL: {settings['description']}")
    seconds = statistics.median(record["seconds"] for record in records[1:] or records)
    return {
        "strategy": settings["strategy"],
        "GPUs": str(ranks),
        "precision": precision,
        "s/epoch (median, first epoch excluded)": f"{seconds:.2f}",
        "accuracy": f"{100 * records[-1]['validation']['metrics']['accuracy']:.2f} %",
    }


if __name__ == "__main__":
    sys.exit(main())
