"""Keeps torch._dynamo out of the ranks of tests until something needs it; Python imports this file at its start.

Every optimizer of PyTorch imports it, to say what torch.compile shall not trace, and that makes a rank's start twice as
long. `disable` and `graph_break` mean nothing where nothing is compiled; whatever else is asked of it brings the real
one. The jobs that start as a user types them (`snippets.in_shell`) do without this file, and so do those of test_hangs.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"


class _Lighter(ModuleType):
    """The module, until more is asked of it."""

    def disable(self, function: Any, *_: object, **__: object) -> Any:
        return function

    def graph_break(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec = PathFinder.find_spec(_NAME, sys.modules["torch"].__path__)
        assert spec is not None
        assert spec.loader is not None
        self.__spec__, self.__loader__, self.__file__ = spec, spec.loader, spec.origin
        self.__path__, self.__package__ = list(spec.submodule_search_locations or []), _NAME
        spec.loader.exec_module(self)
        return getattr(self, name)


class _Finder:
    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, cls) if name == _NAME else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        module.__file__ = __file__  # what looks through all modules asks for it
        module.__class__ = _Lighter


sys.meta_path.insert(0, _Finder)
