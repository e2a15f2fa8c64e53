"""Horovod, as this project builds it."""

from horovod.runner import run

__all__ = ["run"]
__version__ = "0.28.1"
