"""Nothing that is installed of Horovod unpickles what comes from a network; test_exploits.py watches a launcher."""

from __future__ import annotations

import ast
from pathlib import Path

import horovod

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
