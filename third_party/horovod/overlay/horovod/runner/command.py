"""`horovodrun`: checks what it is asked for, finds the way between the hosts, and starts the ranks.

After parts of Horovod's launch.py, Copyright 2019 Uber Technologies, Inc., Apache License 2.0. The options themselves
are still there.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from horovod.runner.common.util import config_parser, hosts, secret, timeout
from horovod.runner.common.util import settings as horovod_settings
from horovod.runner.js_run import js_run
from horovod.runner.launch import is_gloo_used, parse_args, run_controller
from horovod.runner.mpi_run import mpi_run
from horovod.runner.util import login, nested, output, supervise
from horovod.runner.util.lsf import LSFUtils
from horovod.runner.util.network import filter_local_addresses

SECRET_VARIABLE = "HOROVOD_JOB_SECRET"  # noqa: S105 (the name of a variable)
"""Brings every rank 64 hexadecimal digits that nobody else knows, for the services of whoever wants to have some."""

_RSH_AGENT = "OMPI_MCA_plm_rsh_agent"
_OVERSUBSCRIBE = "OMPI_MCA_rmaps_base_oversubscribe"
_SLOTS = "hosts and their slots look like worker-0:2,worker-1:2"


def run_commandline() -> None:
    """Run `horovodrun`, and exit with the code of the rank that failed first."""
    _open_standard_streams()
    _find_what_is_beside_this_python()
    try:
        _run_commandline()
    finally:
        _let_go(sys.stdout)
        _let_go(sys.stderr)


def _run_commandline() -> None:
    verbose = "--verbose" in sys.argv
    args = None
    try:
        args = parse_args()
        verbose = args.verbose
        _run(args)
    except SystemExit as error:
        if args and error.code:
            _name_shadows(args.command)
        raise
    except KeyboardInterrupt:
        output.say("interrupted")
        sys.exit(130)
    except supervise.EndedError as error:
        output.say(error)
        sys.exit(error.exit_code)
    except Exception as error:
        if not _is_for_the_user(error):
            raise
        if verbose:
            traceback.print_exc()
        _tell(error, args)
        # That of the first rank that failed, as mpirun has it: schedulers and supervisors act on it.
        sys.exit(getattr(error, "exit_code", 1))


def _is_for_the_user(error: Exception) -> bool:
    # Others are mistakes of our own, and need their traceback. A bare Exception is how mpi_run speaks.
    return isinstance(error, (RuntimeError, ValueError, OSError, timeout.TimeoutException)) or type(error) is Exception


def _tell(error: Exception, args: argparse.Namespace | None) -> None:
    is_login = isinstance(error, login.LoginError)
    for line in str(error).splitlines() if is_login else [" ".join(str(error).split())]:
        output.say(line)
    if args is None:
        return
    _name_shadows(args.command)
    # It finds out why a host cannot be logged in to, or cannot reach another one.
    has_doctor = shutil.which("trainer", path=str(Path(sys.executable).parent))
    if args.hosts and has_doctor and (is_login or isinstance(error, timeout.TimeoutException)):
        output.say(f"`trainer doctor -H {args.hosts}` looks for the cause on these hosts and between them")


def _open_standard_streams() -> None:
    # A pipe or a socket would take the number of a closed one, and mpirun hangs or crashes without them.
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _let_go(stream: TextIO) -> None:
    # What cannot be written any more would be tried again at Python's end, which then changes the exit code.
    try:
        stream.flush()
    except (OSError, ValueError):
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def _find_what_is_beside_this_python() -> None:
    # Called by its path, horovodrun would miss mpirun, and the ranks would take another python.
    folder, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if folder not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([folder, path])


def _name_shadows(command: Sequence[str]) -> None:
    """Name files beside the script that are imported in place of the packages that the job needs."""
    script = next((word for word in command or [] if word.endswith(".py")), "")
    for name in ("horovod", "torch", "trainer"):
        package = importlib.util.find_spec(name)
        for file in (Path(f"{name}.py"), Path(name, "__init__.py")):
            beside = Path(script).absolute().parent / file
            if package and package.origin and beside.is_file() and not beside.samefile(package.origin):
                output.say(f"{beside} is imported in place of the package {name}; rename it")


def _run(args: argparse.Namespace) -> None:
    if not args.command:
        raise ValueError("no command is given; valid is, for example, horovodrun -np 2 python train.py")
    nested.refuse(os.environ, over_mpi=not _is_over_gloo(args))
    if args.log_level:
        logging.addLevelName(logging.NOTSET, "TRACE")
        logging.basicConfig(level=logging.getLevelName(args.log_level))
    _set_hosts(args)
    _check_slots(args)
    _start(args)


def _is_over_gloo(args: argparse.Namespace) -> bool:
    return bool(is_gloo_used(args.use_gloo, args.use_mpi, args.use_jsrun))


def _set_hosts(args: argparse.Namespace) -> None:
    """Set what is not given to what LSF says, what stands in the hostfile, or this host."""
    if LSFUtils.using_lsf():
        args.num_proc = args.num_proc or LSFUtils.get_num_processes()
        if not args.hosts and not args.hostfile:
            gpus = LSFUtils.get_num_gpus()
            args.hosts = ",".join(f"{host}:{gpus}" for host in LSFUtils.get_compute_hosts())
    if args.hosts is not None and not args.hosts.strip():
        raise ValueError(f"-H names no host; {_SLOTS}")
    if not args.hosts:
        args.hosts = _hosts_in(args.hostfile) if args.hostfile else f"localhost:{args.num_proc}"
    args.hosts = re.sub(r"\s*([:,])\s*", r"\1", args.hosts.strip())


def _hosts_in(hostfile: str) -> str:
    try:
        return str(hosts.parse_host_files(hostfile))
    except UnicodeDecodeError:
        raise ValueError(f"hostfile {hostfile} is not text; its lines look like worker-0 slots=2") from None


def _check_slots(args: argparse.Namespace) -> None:
    if args.num_proc is not None and args.num_proc < 1:
        raise ValueError(f"-np {args.num_proc}: at least 1 is valid")
    source = f"hostfile {args.hostfile}" if args.hostfile else f"-H {args.hosts}"
    try:
        names, slots = hosts.parse_hosts_and_slots(args.hosts)
    except ValueError:
        raise ValueError(f"{source}: {_SLOTS}") from None
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{source} names host {name} {names.count(name)} times; once is valid, with all its slots")
        if slots[name] < 1:
            raise ValueError(f"{source} gives host {name} {slots[name]} slots; at least 1 is valid")
    total = sum(slots.values())
    if args.num_proc and args.num_proc > total and not _may_oversubscribe(args):
        raise ValueError(f"-np {args.num_proc}, but {source} has {total} slot{'s' if total != 1 else ''}")


def _may_oversubscribe(args: argparse.Namespace) -> bool:
    """Return whether Open MPI is told to start more processes than there are slots."""
    options = (args.mpi_args or "").lower()
    by_option = "oversubscribe" in options and "nooversubscribe" not in options
    by_variable = os.environ.get(_OVERSUBSCRIBE, "").lower() in ("1", "true", "yes")
    return (by_option or by_variable) and not _is_over_gloo(args)


def _check_program(args: argparse.Namespace) -> None:
    command = args.command
    if _is_over_gloo(args):
        # A shell starts the ranks, and a program may follow variables.
        command = [word for word in command if not re.match(r"\w+=", word)]
    elif re.search(r"-(wd|wdir|path|x\s+PATH)\b", args.mpi_args or ""):
        return
    name = command[0] if command else ""
    if shutil.which(name):
        return
    where = "" if os.sep in name else " on the PATH"
    if not Path(name).is_file():
        raise ValueError(f"there is no program {name}{where}")
    raise ValueError(
        f"{name} is not a program{where}; a script needs its interpreter, as in horovodrun -np 2 python {name}"
    )


def _settings(args: argparse.Namespace) -> Any:
    # horovodrun has to finish all the checks before this timeout runs out.
    start_timeout = timeout.Timeout(
        args.start_timeout or int(os.getenv("HOROVOD_START_TIMEOUT") or "30"),
        message="Timed out waiting for {activity}. Please check connectivity between servers. You may need to "
        "increase the --start-timeout parameter if you have too many servers.",
    )
    return horovod_settings.Settings(
        verbose=2 if args.verbose else 0,
        ssh_port=args.ssh_port,
        ssh_identity_file=args.ssh_identity_file,
        extra_mpi_args=args.mpi_args,
        tcp_flag=args.tcp_flag,
        binding_args=args.binding_args,
        start_timeout=start_timeout,
        num_proc=args.num_proc,
        hosts=args.hosts,
        output_filename=args.output_filename,
        nics=args.nics,
        prefix_output_with_timestamp=args.prefix_output_with_timestamp,
    )


def _start(args: argparse.Namespace) -> None:
    from horovod.runner.driver import driver_service  # which a mistake in the command line need not wait for

    settings = _settings(args)
    all_hosts, _ = hosts.parse_hosts_and_slots(args.hosts)
    remote_hosts = filter_local_addresses(all_hosts)
    # Other hosts may have other programs.
    if len(remote_hosts) < len(all_hosts):
        _check_program(args)
    if remote_hosts:
        if args.verbose:
            print(f"Logging in to {' '.join(remote_hosts)}")
        login.wait_for_hosts(remote_hosts, settings)
    nics = driver_service.get_common_interfaces(settings, all_hosts, remote_hosts)
    if args.verbose:
        print(f"Interfaces of the job: {' '.join(nics or [])}")
    env = dict(os.environ)
    env[SECRET_VARIABLE] = secret.make_secret_key().hex()
    config_parser.set_env_from_args(env, args)
    _launch(args, settings, nics, env, is_local=not remote_hosts)


def _launch(
    args: argparse.Namespace, settings: Any, nics: set[str] | None, env: dict[str, str], *, is_local: bool
) -> None:
    def over_gloo() -> None:
        from horovod.runner.gloo_run import gloo_run  # which jobs over MPI need not wait for

        gloo_run(settings, nics or set(), env, args.command)

    def over_mpi() -> None:
        # Else mpirun's ranks could not tell that it was not started by hand.
        environment = {**env, "HOROVOD_LAUNCHER": "horovodrun"}
        if is_local and not any(shutil.which(name) for name in ("ssh", "rsh")) and not env.get(_RSH_AGENT):
            # As in many containers. Open MPI ends without either, also where it would not call it.
            environment["OMPI_MCA_plm"] = env.get("OMPI_MCA_plm") or "isolated"
        mpi_run(settings, nics, environment, args.command)

    def over_jsrun() -> None:
        js_run(settings, nics, env, args.command)

    run_controller(args.use_gloo, over_gloo, args.use_mpi, over_mpi, args.use_jsrun, over_jsrun, args.verbose)
