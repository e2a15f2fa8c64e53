"""The command line of `trainer submit`."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from trainer.errors import ConfigError
from trainer.ops.command import OptionsParser, name_of, refuse_launcher, to_command
from trainer.ops.config_file import read_config
from trainer.ops.submit.job import INDEX, Job
from trainer.ops.submit.schedulers import SCHEDULERS, Scheduler
from trainer.ops.submit.secrets import secrets_in

_DESCRIPTION = """\
Write the job file of a training for a cluster's scheduler, and submit it. The ranks save when the time limit is near
or the job is preempted, end with exit code 75, and the job is queued again; the script goes on from its checkpoint.
"""
_EPILOG = f"""\
schedulers:
{{schedulers}}

examples:
  trainer submit slurm --nodes 2 --ranks-per-node 2 --time 2h -- python train.py --checkpoint runs/checkpoints
  trainer submit slurm --nodes 2 --ranks-per-node 8 --gpus-per-node 8 --cpus-per-rank 12 --time 1d --follow \\
      --directive=--partition=gpu -- python train.py --checkpoint runs/checkpoints
  trainer submit slurm --nodes 1 --ranks-per-node 4 --array 0-3 -- python train.py --seed {INDEX} \\
      --checkpoint runs/checkpoints-{INDEX}
  trainer submit mpijob --nodes 2 --ranks-per-node 2 --image registry.example/train:1 --claim runs --dry-run -- \\
      python train.py --checkpoint runs/checkpoints

exit codes:
  0    submitted ({{written}}: written); with --follow, the training is done
  78   with --follow: a mistake of the user's in the script or its data
  1    the scheduler has refused the job; with --follow, the job has failed or was cancelled
  2    these options are not valid; 130: Ctrl-C, which ends --follow and leaves the job alone

The job file is runs/NAME with the scheduler's suffix. Nothing of the environment is written into it.
"""
_NOT_IN_FILE = ("--dry-run", "--follow")
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"(?:(\d{1,3})-)?(\d{1,4}):([0-5]\d):([0-5]\d)")
"""Slurm's own form, days-hours:minutes:seconds. Shorter forms mean minutes to some and hours to others."""
_UNITS_GIB = {"GB": 1, "GiB": 1, "TB": 1024, "TiB": 1024}


_OPTIONS = {
    "the machines": (
        ("--nodes", "nodes", "N", "number of nodes"),
        ("--ranks-per-node", "ranks_per_node", "N", "ranks on each node, one process each"),
        ("--gpus-per-node", "gpus_per_node", "N", "GPUs of each node, one for each rank (none)"),
        ("--cpus-per-rank", "cpus_per_rank", "N", "cores of each rank (the scheduler's default)"),
        ("--memory", "memory_gib", "16GB", "memory of each node (the scheduler's default)"),
        ("--image", "image", "IMAGE", "the container image in which the ranks run (none)"),
    ),
    "Kubernetes": (
        ("--claim", "claim", "NAME", "a PersistentVolumeClaim for runs/ (none)"),
        ("--namespace", "namespace", "NAME", "of the job (that of kubectl)"),
        ("--node-selector", "node_selector", "LABEL=VALUE", "a label that nodes have to have; may be repeated"),
        ("--toleration", "tolerations", "TAINT[=VALUE][:EFFECT]", "a taint that nodes may have; may be repeated"),
        ("--pull-secret", "pull_secrets", "NAME", "a secret with which the image is pulled; may be repeated"),
    ),
    "the job": (
        ("--name", "name", None, "of the job and its file (the script's)"),
        ("--launcher", "launcher", None, "what starts the ranks (the first that the scheduler has)"),
        ("--time", "time_s", "2h", "limit: s, m, h or d, or H:MM:SS (the scheduler's default)"),
        ("--grace", "grace_s", "120s", "time before the limit at which the ranks save (120s)"),
        ("--array", "array", "0-3,7", f"a job for each number, which replaces {INDEX} in the command"),
        ("--directive", "directives", "=TEXT", "a further option of the scheduler's own"),
    ),
}
"""The options by group: each with the field of `Job` that it sets, the name of its value, and its help."""
_REPEATED = ("node_selector", "tolerations", "pull_secrets", "directives")
_OPTION_OF = {field: option for rows in _OPTIONS.values() for option, field, _, _ in rows}


@dataclass(frozen=True)
class Options:
    """A job, and what is to be done with it."""

    job: Job
    scheduler: Scheduler
    is_dry_run: bool
    follows: bool


class _Parser(OptionsParser):
    def error(self, message: str) -> NoReturn:
        if message.startswith("argument --directive:"):
            message = "--directive takes its text behind =, as in --directive=--partition=gpu"
        raise ConfigError(f"{message}; see trainer submit --help")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `submit` to the subcommands; `to_options` reads its arguments."""
    # No character begins an option here, so that all arguments come through as they are.
    parser = subparsers.add_parser(
        "submit", help="write the job file of a cluster's scheduler, and submit it", prefix_chars="\0", add_help=False
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)


def to_options(arguments: Sequence[str]) -> Options | None:
    """Return the checked options; print the help and return None if it was asked for.

    Raises:
        ConfigError: names everything that is not valid, and what would be.
    """
    parser, arguments = _make_parser(), list(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parsed, _ = parser.parse_known_args(arguments[:end])
    if parsed.help:
        parser.print_help()
        return None
    if parsed.config is None:
        return _to_options(parser, arguments, arguments)
    file = read_config(parsed.config, "submit", parser)
    # The scheduler is the only word of the file's that is no option: that of the command line counts.
    words = [word for word in file.words if word.startswith("-") or not parsed.scheduler]
    command = arguments[end:] if end < len(arguments) else ["--", *file.command] if file.command else []
    try:
        return _to_options(parser, [*words, *arguments[:end], *command], arguments)
    except ConfigError as error:
        raise ConfigError(file.locate(str(error), arguments[:end])) from None


def _to_options(parser: _Parser, arguments: list[str], typed: list[str]) -> Options:
    """Return the checked options.

    Args:
        parser: that of `trainer submit`.
        arguments: with those of a file.
        typed: without them, for the head of the job file.

    Raises:
        ConfigError: names everything that is not valid, and what would be.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parsed, unknown = parser.parse_known_args(arguments[:end])
    scheduler = SCHEDULERS.get(parsed.scheduler)
    valid = sorted({word for action in parser._actions for word in action.option_strings if word.startswith("--")})
    problems = []
    if scheduler is None:
        mistake = f"scheduler {parsed.scheduler!r} is not known" if parsed.scheduler else "SCHEDULER is missing"
        problems.append(f"{mistake}; valid are {', '.join(SCHEDULERS)}")
    lacks_dashes = bool(unknown) and not unknown[0].startswith("-")
    if lacks_dashes:
        hint = "; the command goes behind --, as in -- python train.py" if end == len(arguments) else ""
        problems.append(f"{shlex.join(unknown)} is no option" + hint)
    elif unknown:
        problems.append(_unknown_option(unknown, valid))
    begins = typed.index("--") if "--" in typed else len(typed)
    words = [word for at, word in enumerate(typed) if at >= begins or word not in _NOT_IN_FILE]
    made_by = shlex.join(["trainer", "submit", *words])
    job = _read(parsed, to_command(arguments[end:]), scheduler, made_by, problems)
    if job.command:
        problems += _check_command(job)
    elif not lacks_dashes:
        problems.append("there is no command; put it behind --, as in -- python train.py")
    if scheduler:
        problems += [*_check(job, scheduler), *scheduler.problems(job)]
        if parsed.follow and not scheduler.submit_command:
            problems.append(f"{scheduler.name} has no --follow; nobody has run it, and its file is only written")
    if problems or scheduler is None:
        raise ConfigError("; ".join(problems))
    return Options(job, scheduler, parsed.dry_run, parsed.follow)


def _make_parser() -> _Parser:
    schedulers = "\n".join(f"  {name:<11}{scheduler.summary}" for name, scheduler in SCHEDULERS.items())
    written = [name for name, scheduler in SCHEDULERS.items() if not scheduler.submit_command]
    parser = _Parser(
        prog="trainer submit",
        description=_DESCRIPTION,
        epilog=_EPILOG.replace("{schedulers}", schedulers).replace("{written}", ", ".join(written)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
        usage="trainer submit SCHEDULER --nodes N --ranks-per-node N [options] -- COMMAND …",
    )
    parser.add_argument("scheduler", nargs="?", default="", metavar="SCHEDULER", help=f"{', '.join(SCHEDULERS)}")
    for title, rows in _OPTIONS.items():
        group = parser.add_argument_group(title)
        for option, field, metavar, text in rows:
            action = "append" if field in _REPEATED else "store"
            group.add_argument(option, dest=field, metavar=metavar, action=action, help=text)
    group = parser.add_argument_group("what is done")
    group.add_argument("--dry-run", action="store_true", help="print the job file; submit nothing")
    group.add_argument("--follow", action="store_true", help="print the job's output until it ends")
    group.add_argument("--config", metavar="FILE", help="read options and command from [submit] of a TOML file first")
    group.add_argument("-h", "--help", action="store_true", help="show this help")
    return parser


def _unknown_option(words: Sequence[str], valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(words[0].partition("=")[0], valid, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"no such option: {' '.join(words)}{meant} (valid are {', '.join(valid)})"


def _read(
    parsed: argparse.Namespace, command: tuple[str, ...], scheduler: Scheduler | None, made_by: str, problems: list[str]
) -> Job:
    """Return the job, with a valid value in place of each that is not valid, and note the latter in `problems`."""
    given = {name: value for name, value in vars(parsed).items() if name in _OPTION_OF and value}
    values: dict[str, Any] = {name: tuple(value) if name in _REPEATED else value for name, value in given.items()}
    for name, (convert, valid) in _NUMBERS.items():
        text = getattr(parsed, name)
        if text is None and name in ("nodes", "ranks_per_node"):
            problems.append(f"{_OPTION_OF[name]} is missing; valid is {valid}")
        elif text is not None and (value := convert(text)) is None:
            problems.append(f"{_OPTION_OF[name]} is {text!r}; valid is {valid}")
            values.pop(name, None)
        elif text is not None:
            values[name] = value
    name = name_of(command or ("train",))
    defaults: dict[str, Any] = {
        "name": scheduler.name_from(name) if scheduler else name,
        "nodes": 1,
        "ranks_per_node": values.get("gpus_per_node", 1),
        "launcher": scheduler.launchers[0] if scheduler else "",
    }
    return Job(command=command, made_by=made_by, **{**defaults, **values})


def _count(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[1-9]\d{0,5}", text) else None


def _amount(text: str, units: dict[str, int]) -> int | None:
    match = re.fullmatch(r"([1-9]\d{0,5})([A-Za-z]+)", text)
    return int(match[1]) * units[match[2]] if match and match[2] in units else None


def _seconds(text: str) -> int | None:
    match = _CLOCK.fullmatch(text)
    if match is None:
        return _amount(text, _UNITS_S)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return (((24 * days + hours) * 60 + minutes) * 60 + seconds) or None


_COUNT = "a number of at least 1"
_TIME = f"a number with {', '.join(_UNITS_S)}, as in {{}}, or H:MM:SS"
_NUMBERS: dict[str, tuple[Callable[[str], int | None], str]] = {
    "nodes": (_count, _COUNT),
    "ranks_per_node": (_count, _COUNT),
    "gpus_per_node": (_count, _COUNT),
    "cpus_per_rank": (_count, _COUNT),
    "memory_gib": (lambda text: _amount(text, _UNITS_GIB), f"a number with {', '.join(_UNITS_GIB)}, as in 16GB"),
    "time_s": (_seconds, _TIME.format("2h")),
    "grace_s": (_seconds, _TIME.format("120s")),
}
"""The fields of `Job` that are numbers: how their text is read, and what is valid."""


def _check_command(job: Job) -> list[str]:
    problems = [
        f"the value of {word} would be written into the job file; set it in the environment of the job"
        for word in secrets_in(job)
    ]
    if problem := refuse_launcher(job.command, "the job"):
        problems.append(problem)
    if any(not word.isprintable() for word in (*job.command, *job.directives, job.image)):
        problems.append("the command has a line break or another character that is not printable; put it into a script")
    return problems


def _check(job: Job, scheduler: Scheduler) -> list[str]:
    """Return what no scheduler can do, or this scheduler cannot, a line each."""
    problems = []
    if not re.fullmatch(r"[A-Za-z][\w.-]{0,62}", job.name):
        problems.append(f"--name is {job.name!r}; valid are up to 63 letters, digits, '.', '_' and '-', a letter first")
    if job.launcher not in scheduler.launchers:
        problems.append(f"--launcher is {job.launcher!r}; {scheduler.name} has {', '.join(scheduler.launchers)}")
    problems += [
        f"{scheduler.name} has no {_OPTION_OF[field]}; {instead}"
        for field, instead in scheduler.lacks.items()
        if getattr(job, field)
    ]
    if job.gpus_per_node and job.gpus_per_node != job.ranks_per_node:
        problems.append(
            f"--gpus-per-node is {job.gpus_per_node}, and --ranks-per-node is {job.ranks_per_node}; each rank has one "
            f"GPU: valid is --ranks-per-node {job.gpus_per_node}"
        )
    if job.time_s is not None and job.time_s <= (least := job.grace_s + scheduler.early_s):
        problems.append(f"--time is {job.time_s} s, and --grace is {job.grace_s} s; valid is a --time over {least} s")
    if job.array and not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", job.array):
        problems.append(f"--array is {job.array!r}; valid are numbers as in 0-3,7")
    if job.command and bool(job.array) != any(INDEX in word for word in job.command):
        problems.append(
            f"--array and {INDEX} in the command go together, as in --array 0-3 -- python a.py --seed {INDEX}"
        )
    return problems
