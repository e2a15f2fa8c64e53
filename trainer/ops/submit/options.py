"""The command line of `trainer submit`."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn

from trainer.errors import ConfigError
from trainer.ops.command import OptionsParser, name_of, refuse_launcher, to_command
from trainer.ops.submit.job import INDEX, OPTIONS, Job
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
    parser, end = _make_parser(), arguments.index("--") if "--" in arguments else len(arguments)
    typed, command = list(arguments[:end]), list(arguments[end:])
    made_by = shlex.join(["trainer", "submit", *(word for word in typed if word not in _NOT_IN_FILE), *command])
    parsed, _ = parser.parse_known_args(typed)
    if parsed.help:
        parser.print_help()
        return None
    return _read(parser, typed, command, made_by)


def _read(parser: _Parser, words: list[str], command: list[str], made_by: str) -> Options:
    """Return the checked options.

    Args:
        words: what stands before the command.
        command: begins with "--"; empty without one.

    Raises:
        ConfigError: names everything that is not valid, and what would be.
    """
    parsed, unknown = parser.parse_known_args(words)
    scheduler = SCHEDULERS.get(parsed.scheduler)
    problems = []
    if scheduler is None:
        mistake = f"scheduler {parsed.scheduler!r} is not known" if parsed.scheduler else "SCHEDULER is missing"
        problems.append(f"{mistake}; valid are {', '.join(SCHEDULERS)}")
    lacks_dashes = bool(unknown) and not unknown[0].startswith("-")
    if lacks_dashes:
        hint = "" if command else "; the command goes behind --, as in -- python train.py"
        problems.append(f"{shlex.join(unknown)} is no option" + hint)
    elif unknown:
        problems.append(_unknown_option(unknown, parser))
    job = _to_job(parsed, to_command(command), scheduler, made_by, problems)
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
    for title, options in groupby(OPTIONS.items(), lambda item: item[1].group):
        group = parser.add_argument_group(title)
        for field, option in options:
            action = "append" if isinstance(getattr(Job, field), tuple) else "store"
            group.add_argument(option.name, dest=field, metavar=option.metavar, action=action, help=option.help)
    group = parser.add_argument_group("what is done")
    group.add_argument("--dry-run", action="store_true", help="print the job file; submit nothing")
    group.add_argument("--follow", action="store_true", help="print the job's output until it ends")
    group.add_argument("-h", "--help", action="store_true", help="show this help")
    return parser


def _unknown_option(words: Sequence[str], parser: _Parser) -> str:
    valid = sorted({word for action in parser._actions for word in action.option_strings if word.startswith("--")})
    near = difflib.get_close_matches(words[0].partition("=")[0], valid, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"no such option: {' '.join(words)}{meant} (valid are {', '.join(valid)})"


def _to_job(
    parsed: argparse.Namespace, command: tuple[str, ...], scheduler: Scheduler | None, made_by: str, problems: list[str]
) -> Job:
    """Return the job, with its default in place of each value that is not valid, and note the latter in `problems`."""
    values: dict[str, Any] = {}
    for field, option in OPTIONS.items():
        given = getattr(parsed, field)
        if option.number is None:
            if given:
                values[field] = tuple(given) if isinstance(given, list) else given
        elif given is not None:
            if (value := option.number.read(given)) is None:
                problems.append(f"{option.name} is {given!r}; valid is {option.number.valid}")
            else:
                values[field] = value
        elif field in ("nodes", "ranks_per_node"):
            problems.append(f"{option.name} is missing; valid is {option.number.valid}")
    values.setdefault("ranks_per_node", values.get("gpus_per_node", 1))
    name = name_of(command or ("train",))
    values.setdefault("name", scheduler.name_from(name) if scheduler else name)
    values.setdefault("launcher", scheduler.launchers[0] if scheduler else "")
    return Job(command=command, made_by=made_by, **values)


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
        f"{scheduler.name} has no {OPTIONS[field].name}; {instead}"
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
