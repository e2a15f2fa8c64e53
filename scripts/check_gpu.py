"""Check this library on a machine with GPUs, the most valuable first: `make check-gpu`.

    python scripts/check_gpu.py --minutes 10
    python scripts/check_gpu.py --minutes 60 --device cpu    # rehearses it, with small sizes

(a) What few have run: the doctor, examples with the ring and the parameter server, FSDP, the mean of bf16 on three
ranks, images in bf16. (b) A ResNet-50 and a GPT on one rank, beside PyTorch alone, DDP by hand, Fabric and Accelerate.
(c) MNIST: a plain loop, and ours. (d) Exactness on 2 and 4 ranks. Where there are fewer GPUs than ranks, they share.

Each stage has a time limit, and one that fails ends no other. What no longer fits is left out. After each, the tables
are written to check-gpu.md and check-gpu.json. Exits with code 1 where a stage failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scaling.report import markdown_table
from torch.distributed.fsdp import FSDPModule

from benchmarks.common import REPORT_PREFIX
from benchmarks.contestants import read_report
from benchmarks.launching import PEERS, has_peers
from measuring import Finished, cpu_model, run
from trainer import TrainerError, report_failures
from trainer.cluster.gpus import SHARING, nccl_version
from trainer.files import write_atomically
from trainer.tuning.host import host_cores

ROOT = Path(__file__).resolve().parents[1]
SLOWER_ON_CPU = 10
COLUMNS = ("part", "subject", "name", "outcome", "seconds", "said")
SIZES = ("64K", "4M", "256M")
"""Of the all-reduces between several GPUs."""
HAND, PLAIN = "DDP by hand", "a plain loop"
"""What the others are compared with."""
PYTHON, TORCHRUN, HOROVODRUN, OF_PEERS = "python", "torchrun", "horovodrun --mpi", "torchrun of .venv-peers"
LIBRARIES = {
    "PyTorch alone": (PYTHON, "plain"),
    HAND: (TORCHRUN, "ddp"),
    "ours, ddp": (TORCHRUN, "ours"),
    "ours, Horovod": (HOROVODRUN, "ours"),
    "Fabric": (OF_PEERS, "fabric"),
    "Accelerate": (OF_PEERS, "accelerate"),
}
MNIST = {
    "ours": (PYTHON, [], {}),
    "ours, compiled": (PYTHON, ["--compile"], {}),
    "ours, CUDA graphs": (PYTHON, ["--compile"], {"TORCHINDUCTOR_CUDAGRAPHS": "1"}),  # mode="reduce-overhead"
    "ours, ddp": (TORCHRUN, [], {}),
    "ours, Horovod": (HOROVODRUN, [], {}),
}
PROOFS = {
    "Horovod": "horovod-horovodrun-mpi-2",
    "Horovod, 4 ranks": "horovod-horovodrun-gloo-4",
    "DDP": "ddp-torchrun-2",
    "ring": "ring-mpirun-2",
    "parameter server": "parameter_server-torchrun-2",
    "one rank": "single-python-1 or horovod-horovodrun-mpi-1 or test_one_rank",
    "hangs": "test_hangs",
}
"""Which of tests/gpu prove what."""


class Stage(NamedTuple):
    """One command of the check."""

    part: str
    subject: str
    name: str
    command: list[str]
    limit_s: int = 60
    env: Mapping[str, str] = {}
    left_out: str = ""
    """Why it cannot run here; empty if it can."""


Result = dict[str, Any]
"""A stage's part, subject, name, outcome, seconds, figures, the last line, and the end of what it printed."""


def main() -> int:
    started = time.monotonic()
    report_failures()
    options = _parse_options()
    device = describe_devices(options.device)
    files = {suffix: options.output / f"check-gpu.{suffix}" for suffix in ("md", "json")}
    options.output.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="trainer-check-") as name:
        for stage in stages(options.device, options.data_dir.resolve(), Path(name)):
            if stage.part in options.parts:
                left_s = 60 * options.minutes - (time.monotonic() - started)
                results.append(_run(stage, left_s, options.device, Path(name)))
                content = {"device": device, "stages": results}
                write_atomically(files["json"], json.dumps(content, indent=2) + "\n")
                write_atomically(files["md"], f"## {device}\n\n{tables(results)}\n")
    print(files["md"].read_text())
    return int(any(result["outcome"] == "failed" for result in results))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="contains MNIST/raw (default: %(default)s)")
    add("--minutes", type=float, default=10.0, metavar="N", help="for all stages together (default: %(default)s)")
    add("--parts", nargs="+", choices="abcd", default="abcd", metavar="PART", help="of a b c d (default: all)")
    add("--output", type=Path, default=Path("runs"), metavar="DIR", help="for the tables (default: %(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses this check where there is no GPU")
    return parser.parse_args()


def describe_devices(device: str) -> str:
    """Return the GPUs' number and names, as in "2 × NVIDIA A100", or the processor's, and PyTorch's versions.

    Raises:
        TrainerError: there is no GPU.
    """
    if device == "cpu":
        return f"{host_cores()} cores, {cpu_model()}, PyTorch {torch.__version__}"
    names = Counter(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    if not names:
        raise TrainerError("PyTorch finds no GPU on this machine; run this on one where nvidia-smi lists a GPU")
    gpus = ", ".join(f"{count} × {name}" for name, count in names.items())
    nccl = ".".join(map(str, nccl_version() or ("none",)))
    return f"{gpus}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"


def stages(device: str, data_dir: Path, folder: Path) -> list[Stage]:
    """Return all stages, in their order. On several GPUs, MNIST is trained as well, and the all-reduce is timed.

    Args:
        device: "cuda", or "cpu" with small sizes.
        data_dir: has MNIST.
        folder: for what the stages leave.
    """
    on_gpu = device == "cuda"
    on = ["--device", device]
    mnist = ["examples/mnist.py", *on, "--data-dir", str(data_dir), "--dataset", "mnist"]
    example = [*mnist, "--output", "none", "--target-accuracy", "98.5", "--strategy"]
    too_old = "" if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else "fsdp needs PyTorch 2.13"
    images = ["examples/image_folder.py", *on, "--precision", "bf16", "--epochs", "2"]
    steps = ["benchmarks/device_steps.py", *on, *([] if on_gpu else ["--steps", "1", "--epochs", "1"])]
    doctor = ["-m", "trainer", "doctor", *(["--gpu"] if on_gpu else [])]
    shares, gpus = {SHARING: "1"}, torch.cuda.device_count() if on_gpu else 0
    found = [
        Stage("a", "doctor", "one host", _launch(PYTHON, 1, doctor)),
        Stage("a", "example", "ring, 2 ranks", _launch(HOROVODRUN, 2, [*example, "ring"]), env=shares),
        Stage("a", "example", "parameter server", _launch(TORCHRUN, 2, [*example, "parameter_server"]), env=shares),
        _proof("a", "FSDP, 2 ranks, against one process", "fsdp-torchrun-2", device)._replace(left_out=too_old),
        _proof("a", "mean of bf16, 3 ranks", "horovod-horovodrun-mpi-3", device),
        Stage("a", "example", "images in bf16", _launch(PYTHON, 1, images)),
    ]
    for model in ("resnet50", "gpt"):
        for name, (launcher, contestant) in LIBRARIES.items():
            found.append(Stage("b", model, name, _launch(launcher, 1, [*steps, contestant, "--model", model])))
    plain = [*steps, "plain", "--model", "mnist", "--data-dir", str(data_dir)]
    found.append(Stage("c", "mnist", PLAIN, _launch(PYTHON, 1, plain)))
    epochs, runs = "4" if on_gpu else "2", [(name, 1, *how) for name, how in MNIST.items()]
    together = ((HOROVODRUN, "horovod"), (TORCHRUN, "nccl")) if gpus > 1 else ()
    runs += [(f"ours, {transport}, {gpus} GPUs", gpus, launcher, [], {}) for launcher, transport in together]
    for name, ranks, launcher, extra, env in runs:
        script = [*mnist, "--batch-size", str(256 // ranks), "--epochs", epochs, "--output", str(folder / f"c-{name}")]
        found.append(Stage("c", "mnist", name, _launch(launcher, ranks, [*script, *extra]), env=env))
    for launcher, transport in together:
        script = ["scripts/comm_bench.py", *on, "--only", transport, "--sizes", *SIZES]
        found.append(Stage("d", "all-reduce", transport, _launch(launcher, gpus, script)))
    return found + [_proof("d", name, selected, device) for name, selected in PROOFS.items()]


def _launch(launcher: str, ranks: int, script: list[str]) -> list[str]:
    if launcher in (TORCHRUN, OF_PEERS):
        python = str(PEERS / "bin" / "python") if launcher == OF_PEERS and has_peers() else sys.executable
        return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *script]
    start = [*launcher.split(), "-np", str(ranks), "-H", f"localhost:{ranks}"] if launcher == HOROVODRUN else []
    return [*start, sys.executable, *script]


def _proof(part: str, name: str, selected: str, device: str) -> Stage:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "-k", selected]
    return Stage(part, "exactness", name, command, 90, {"TRAINER_TEST_DEVICE": device})


def _run(stage: Stage, left_s: float, device: str, folder: Path) -> Result:
    """Run a stage, or leave it out where it cannot run here, or less than half of its limit is left."""
    result: Result = {"part": stage.part, "subject": stage.subject, "name": stage.name, "figures": {}, "seconds": 0.0}
    limit_s = stage.limit_s * (1 if device == "cuda" else SLOWER_ON_CPU)
    if stage.left_out or left_s < limit_s / 2:
        said = stage.left_out or f"{left_s:.0f} s were left, and it may take {limit_s}"
        result |= {"outcome": "left out", "said": said}
    else:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), **stage.env}
        if device == "cpu":
            env["OMP_NUM_THREADS"] = "1"
        try:
            done = run(stage.command, env=env, timeout_s=min(limit_s, left_s), cwd=ROOT)
        except FileNotFoundError as error:  # no horovodrun, where Horovod could not be compiled
            done = Finished(code=127, stdout="", stderr=str(error), seconds=0.0)
        printed = [line.strip("= ") for line in done.stdout.splitlines() if line.strip()] or [""]
        result |= {"outcome": "failed" if done.problem else "ok", "seconds": round(done.seconds, 1)}
        result["figures"] = {} if done.problem else _figures(done, folder / f"{stage.part}-{stage.name}")
        result["said"] = (done.problem or ("" if result["figures"] else printed[-1])).replace("|", "/")[:200]
        result["output"] = done.stdout[-3000:] + (done.stderr[-3000:] if done.problem else "")
    print("check:", *(result[key] for key in COLUMNS), result["figures"] or "", file=sys.stderr, flush=True)
    return result


def _figures(done: Finished, record: Path) -> dict[str, float]:
    for line in done.stdout.splitlines():
        if line.startswith(REPORT_PREFIX):
            figures: dict[str, float] = json.loads(line.removeprefix(REPORT_PREFIX))
            return figures
    report = read_report(done, record) if record.exists() else None
    if report is None:
        return {}
    later = sorted(report.seconds[1:] or report.seconds)
    return {"s/epoch": later[len(later) // 2], "accuracy": report.score}


def tables(results: list[Result]) -> str:
    """Return two tables in Markdown: how each stage ended, and the figures, with ratios where there is a reference."""
    text = markdown_table(COLUMNS, [[str(result[key]) for key in COLUMNS] for result in results])
    measured = [(one["subject"], one["name"], *next(iter(one["figures"].items()))) for one in results if one["figures"]]
    references = {subject: value for subject, name, _, value in measured if name in (HAND, PLAIN)}
    body = [
        [subject, name, f"{value:.3f} {unit}", f"{value / references[subject]:.3f}" if subject in references else ""]
        for subject, name, unit, value in measured
    ]
    return f"{text}\n\n{markdown_table(['model', 'how', 'time', f'× {HAND}, or {PLAIN}'], body)}" if body else text


if __name__ == "__main__":
    sys.exit(main())
