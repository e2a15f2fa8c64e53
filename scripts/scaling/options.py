"""Command-line options of scaling_test.py."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from scaling.jobs import ROOT, TRANSPORT_OF, Plan, parse_hosts, parse_shapes
from trainer.errors import ConfigError
from trainer.tuning.host import host_cores

SCALINGS = ("weak", "strong")


def parse_args(description: str | None) -> argparse.Namespace:
    """Parse and check the options; `plan` and `shapes` are derived from them.

    Raises:
        ConfigError: a value is not valid.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    _add_options(parser)
    options = parser.parse_args()
    _check(options)
    return options


def _add_options(parser: argparse.ArgumentParser) -> None:
    add, slots = parser.add_argument, f"localhost:{max(2, host_cores())}"
    add("--hosts", default=slots, metavar="LIST", help="hosts and slots, this host first (default: %(default)s)")
    add("--shapes", metavar="LIST", help="hosts x ranks on each (default: one and all hosts, with one and all slots)")
    add("--strategies", default="horovod", metavar="LIST", help=f"of {','.join(TRANSPORT_OF)} (default: %(default)s)")
    add("--scaling", default=",".join(SCALINGS), metavar="LIST", help="weak, strong or both (default: %(default)s)")
    add("--batch-size", type=int, default=100, metavar="N", help="samples per step on 1x1 (default: %(default)s)")
    what = "the script's option for samples per rank and step; '' for none (default: %(default)s)"
    add("--batch-flag", default="--batch-size", metavar="FLAG", help=what)
    add("--global-batch", action="store_true", help="--batch-flag is for the samples of all ranks per step")
    add("--steps", default="100", metavar="N|all", help="steps of each run, after 5 to warm up (default: %(default)s)")
    add("--repeats", type=int, default=3, metavar="N", help="runs of each shape (default: %(default)s)")
    add("--timeout", type=float, default=900.0, metavar="S", help="of each run, in seconds (default: %(default)s)")
    add("--try-advice", action="store_true", help="run the advice, with the options of the examples, and compare")
    add("--output", type=Path, default=Path("runs/scaling"), metavar="DIR", help="for results (default: %(default)s)")
    what = "training script and its arguments (default: examples/mnist.py --epochs 1 --output none)"
    add("script", nargs=argparse.REMAINDER, help=what)


def _check(options: argparse.Namespace) -> None:
    for name in ("repeats", "batch_size", "timeout"):
        if getattr(options, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be positive")
    if options.steps != "all" and (not options.steps.isdecimal() or int(options.steps) < 1):
        raise ConfigError(f"--steps is {options.steps!r}; valid is a positive number, or all")
    for name, valid in (("strategies", tuple(TRANSPORT_OF)), ("scaling", SCALINGS)):
        chosen = list(dict.fromkeys(getattr(options, name).split(",")))
        if unknown := [value for value in chosen if value not in valid]:
            raise ConfigError(f"--{name} has {unknown[0]!r}; valid are {', '.join(valid)}")
        setattr(options, name, chosen)
    hosts = parse_hosts(options.hosts)
    options.shapes = parse_shapes(options.shapes, hosts)
    if hosts[0].name not in ("localhost", socket.gethostname()):
        raise ConfigError(
            f"--hosts begins with {hosts[0].name}, and this is {socket.gethostname()}; run this on the first host"
        )
    _check_batch(options)
    script = options.script or [str(ROOT / "examples/mnist.py"), "--epochs", "1", "--output", "none"]
    if not Path(script[0]).is_file():
        raise ConfigError(f"there is no script {script[0]}")
    options.plan = Plan(
        hosts=hosts,
        script=[str(Path(script[0]).resolve()), *script[1:]],
        batch_flag=options.batch_flag,
        global_batch=options.global_batch,
        steps=None if options.steps == "all" else int(options.steps),
        timeout_s=options.timeout,
    )


def _check_batch(options: argparse.Namespace) -> None:
    if "strong" in options.scaling and options.batch_flag == "":
        raise ConfigError(
            "strong scaling needs --batch-flag, the script's option for its batch size; valid without it is weak"
        )
    if options.global_batch and options.batch_flag == "":
        raise ConfigError("--global-batch says what --batch-flag is for, and there is none")
    uneven = [shape for shape in options.shapes if options.batch_size % shape.ranks]
    if "strong" in options.scaling and uneven:
        raise ConfigError(
            f"--batch-size is {options.batch_size}, which {uneven[0].ranks} ranks cannot share in strong scaling"
        )
