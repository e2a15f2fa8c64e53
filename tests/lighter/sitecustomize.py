"""Keeps torch._dynamo out of the ranks of tests until something needs it; Python imports this file at its start.

Every optimizer of PyTorch imports it, to say what torch.compile shall not trace, and that makes a rank's start twice as
long. `disable` and `graph_break` mean nothing where nothing is compiled; whatever else is asked of it brings the real
one. `make test-jobs` asks for this file (TRAINER_TEST_LIGHTER), and `make test-all` has PyTorch as it is. So have the
jobs that start as a user types them (`snippets.in_shell`), and the trials of hangs.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"


class _Lighter(ModuleType):
    __path__: list[str] = []  # noqa: RUF012
    __file__ = __file__  # for whoever looks through all modules

    def disable(self, function: Any, *_: object, **__: object) -> Any:
        return function

    def graph_break(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(_bring(), name)


class _Finder:
    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, cls) if f"{name}.".startswith(f"{_NAME}.") else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        # Most modules of it are imported by itself already, and must not be once more.
        return _Lighter(_NAME) if spec.name == _NAME else (_bring(), import_module(spec.name))[1]

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


def _bring() -> ModuleType:
    if _Finder in sys.meta_path:
        sys.meta_path.remove(_Finder)
        del sys.modules[_NAME]
    return import_module(_NAME)


sys.meta_path.insert(0, _Finder)
