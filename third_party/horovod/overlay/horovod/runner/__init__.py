"""What starts jobs: `horovodrun`, but no functions."""

from typing import NoReturn

from horovod.runner.util import closed


def run(*_: object, **__: object) -> NoReturn:
    """Refuse to run a function on several ranks: a server would hand it out as a pickle, and the ranks load it.

    Raises:
        ImportError: always.
    """
    closed.refuse("horovod.run")
