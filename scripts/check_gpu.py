"""Check training on a machine with GPUs: `make check-gpu`.

Runs the tests for GPUs (tests/gpu). Then trains MNIST through Horovod over NCCL and through DDP (torch.distributed), on
one GPU and on all of them, and times the all-reduce between several. Prints the GPUs, and tables in Markdown. Fails if
a test or a run fails, if its accuracy is below 99 %, or if its gradients were not all-reduced over NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from measuring import cpu_model, run
from scaling.report import markdown_table

from trainer import TrainerError, report_failures
from trainer.cluster.gpus import nccl_version
from trainer.tuning.host import host_cores

ROOT = Path(__file__).resolve().parents[1]
TARGET_PERCENT = {"mnist": 99.0, "digits": 0.0}
RUN_TIMEOUT_S = 600
LAUNCHERS = ("horovodrun", "torchrun")
REHEARSED_RANKS = 2
SIZES = ("64K", "4M", "256M")


def main() -> int:
    options = _parse_options()
    report_failures()
    ranks = sorted({1, _device_count(options.device)})
    if not options.skip_tests:
        _run_tests(options.device)
    rows = [
        _train(launcher, number, precision, options)
        for number in ranks
        for launcher in options.launchers
        for precision in ("fp32", "bf16")
    ]
    print(f"\n## {describe_devices(options.device)}\n\n{_table(rows)}")
    if ranks[-1] > 1:
        print(
            "\n" + _table([row for launcher in options.launchers for row in _all_reduce(launcher, ranks[-1], options)])
        )
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="contains MNIST/raw (default: %(default)s)")
    add("--epochs", type=int, default=5, metavar="N", help="of each run (default: %(default)s)")
    add("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS, metavar="NAME", help="default: all of them")
    add("--skip-tests", action="store_true", help="only measure")
    add("--dataset", choices=tuple(TARGET_PERCENT), default="mnist", help="digits needs no download, and is tiny")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses this check where there is no GPU")
    return parser.parse_args()


def _device_count(device: str) -> int:
    import torch

    if device == "cpu":
        return REHEARSED_RANKS
    if torch.cuda.device_count() == 0:
        raise TrainerError("PyTorch finds no GPU on this machine; run this on one where nvidia-smi lists a GPU")
    return torch.cuda.device_count()


def describe_devices(device: str) -> str:
    """Return the GPUs' number and names, as in "2 × NVIDIA A100", or the processor's, and PyTorch's versions."""
    import torch

    if device == "cpu":
        return f"{host_cores()} cores, {cpu_model()}, PyTorch {torch.__version__}"
    names = Counter(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    gpus = ", ".join(f"{count} × {name}" for name, count in names.items())
    nccl = ".".join(map(str, nccl_version() or ("none",)))
    return f"{gpus}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"


def _run_tests(device: str) -> None:
    env = {**os.environ, "TRAINER_TEST_DEVICE": device}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "tests/gpu"]
    if subprocess.run(command, cwd=ROOT, env=env, check=False).returncode != 0:
        raise TrainerError("tests/gpu failed, see above; --skip-tests measures all the same")


def _train(launcher: str, ranks: int, precision: str, options: argparse.Namespace) -> dict[str, str]:
    """Train once and return a row of the table.

    Raises:
        TrainerError: the run failed, or did not use NCCL.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "run")
        script = [str(ROOT / "examples" / "mnist.py"), "--device", options.device, "--dataset", options.dataset]
        script += ["--data-dir", str(options.data_dir), "--epochs", str(options.epochs), "--precision", precision]
        script += ["--output", str(output), "--target-accuracy", str(TARGET_PERCENT[options.dataset])]
        _launch(launcher, ranks, script, precision)
        settings = json.loads((output / "settings.json").read_text())
        records = [json.loads(line) for line in (output / "epochs.jsonl").read_text().splitlines()]
    if options.device == "cuda" and "NCCL" not in settings["description"]:
        raise TrainerError(f"the gradients were not all-reduced over NCCL: {settings['description']}")
    seconds = statistics.median(record["seconds"] for record in records[1:] or records)
    return {
        "strategy": settings["strategy"],
        "ranks": str(ranks),
        "precision": precision,
        "s/epoch (median, first epoch excluded)": f"{seconds:.2f}",
        "samples/s": f"{records[-1]['samples'] / seconds:,.0f}",
        "accuracy": f"{100 * records[-1]['validation']['metrics']['accuracy']:.2f} %",
    }


def _all_reduce(launcher: str, ranks: int, options: argparse.Namespace) -> list[dict[str, str]]:
    """Time the all-reduce between all ranks and return rows of the table.

    Raises:
        TrainerError: it failed, or a sum was wrong.
    """
    transport = {"horovodrun": "horovod", "torchrun": "nccl" if options.device == "cuda" else "gloo"}[launcher]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "comm.json")
        script = [str(ROOT / "scripts" / "comm_bench.py"), "--device", options.device, "--json", str(file)]
        _launch(launcher, ranks, [*script, "--only", transport, "--sizes", *SIZES], "all-reduce")
        rows = json.loads(file.read_text())["rows"]
    return [
        {
            "all-reduce": row["transport"],
            "ranks": str(row["ranks"]),
            "bytes": f"{row['size']:,}",
            "µs": f"{row['seconds'] * 1e6:,.0f}",
            "bus bandwidth, GB/s": f"{row['busbw'] / 1e9:.1f}",
        }
        for row in rows
    ]


def _launch(launcher: str, ranks: int, script: list[str], what: str) -> None:
    launch = {
        "horovodrun": ["horovodrun", "-np", str(ranks), "-H", f"localhost:{ranks}", sys.executable],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", str(ranks)],
    }[launcher]
    command = [*launch, *script]
    print(f"trainer: {launcher}, {ranks} rank{'s' * (ranks > 1)}, {what}", file=sys.stderr, flush=True)
    done = run(command, env=os.environ, timeout_s=RUN_TIMEOUT_S)
    if done.problem:
        raise TrainerError(f"{' '.join(command)} failed ({done.problem}):\n{done.stdout[-3000:]}{done.stderr[-4000:]}")


def _table(rows: list[dict[str, str]]) -> str:
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows])


if __name__ == "__main__":
    sys.exit(main())
