"""Nothing that comes from a network is unpickled: neither in what is installed of Horovod, nor in a job's launcher."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import horovod
import pytest

from tests.distributed.harness import command_for
from tests.security.running import running

PACKAGE = Path(horovod.__file__).parent
# What can make objects, and run code, of bytes.
LOADERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing.managers", "xmlrpc", "socketserver"}
# Who imports any of these, and why that is no door.
KNOWN = {
    "torch/functions.py": {"cloudpickle"},  # objects that the script hands to its own ranks: broadcast_object
    "runner/http/http_server.py": {"socketserver"},  # the rendezvous, which keeps bytes
}


def imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names | {name.partition(".")[0] for name in names}


def test_what_is_installed_has_no_other_way_to_load_objects() -> None:
    users = {file.relative_to(PACKAGE).as_posix(): imported(file) & LOADERS for file in PACKAGE.rglob("*.py")}
    assert {name: loaders for name, loaders in users.items() if loaders} == KNOWN


def test_what_opened_doors_is_not_installed() -> None:
    doors = ["runner/elastic", "runner/common/service", "runner/task", "runner/run_task.py", "runner/task_fn.py"]
    doors += ["runner/common/util/network.py", "runner/common/util/codec.py", "runner/http/http_client.py"]
    assert [name for name in doors if list(PACKAGE.glob(f"{name.removesuffix('.py')}*"))] == []
    assert [file.name for name in ("spark", "ray") for file in (PACKAGE / name).glob("*.py")] == ["__init__.py"] * 2


WATCHED = """
import builtins, pickle, sys, _pickle

def refuse(*_, **__):
    raise SystemExit("something was unpickled")

pickle.load = pickle.loads = _pickle.load = _pickle.loads = refuse
pickle.Unpickler = _pickle.Unpickler = refuse
sys.argv = sys.argv[1:]
from horovod.runner.command import run_commandline
run_commandline()
"""


@pytest.mark.distributed
def test_a_launcher_unpickles_nothing_while_its_ranks_meet() -> None:
    horovodrun, *options = command_for("horovodrun-gloo", 2, ["-c", "import horovod.torch as hvd; hvd.init()"])
    with running([sys.executable, "-c", WATCHED, horovodrun, *options]) as job:
        assert job.process.wait(60) == 0, job.text()
