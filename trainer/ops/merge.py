"""`trainer merge`: makes one file for plain PyTorch of a checkpoint that ranks have written in parts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint.disk.committed import MANIFEST, load, newest
from trainer.cluster.output import print_line
from trainer.errors import ConfigError, DataError
from trainer.files import save_atomically

_DESCRIPTION = """\
Write the whole state of a checkpoint into one file, for torch.load(FILE,
weights_only=True); or its model's weights into FILE.safetensors.
"""


def add_parser(new: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `trainer merge` to the command line's subcommands."""
    help_text = "make one file of a checkpoint that ranks have written in parts"
    parser = new("merge", help=help_text, description=_DESCRIPTION)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its folder, or a folder of checkpoints")
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to make; it must not be there yet")


def merge(checkpoint: Path, file: Path) -> int:
    """Write a checkpoint's whole state into a file; return the exit code.

    Raises:
        ConfigError: there is no valid checkpoint, or the file is there already.
        TrainerError: the file cannot be written; nothing of it is left.
    """
    # Late, because the command line starts without PyTorch.
    from trainer.checkpoint.disk.state_files import read_state
    from trainer.models.sharded import shard_as

    if file.exists():
        raise ConfigError(f"{file} is there already; name another file, or remove it")
    problems: list[str] = []
    try:
        is_one = (checkpoint / MANIFEST).is_file()
        committed = load(checkpoint) if is_one else newest(checkpoint, problems.append)
    except DataError as error:
        raise ConfigError(str(error)) from None
    if committed is None:
        raise ConfigError("; ".join(problems) or f"{checkpoint} is no checkpoint, and there is none in it")
    state = shard_as(read_state(committed.path), None)
    if file.suffix == ".safetensors":
        if (models := len(state["models"])) != 1:
            raise ConfigError(f"{committed.path.name} has {models} models, and {file.name} takes one; name a .pt file")
        (state,) = state["models"]
    save_atomically(file, state)
    parts = sum(name.startswith("part-") for name in committed.files)
    print_line(f"{file}: {file.stat().st_size:,} bytes, of {parts or 'no'} parts of {committed.path.name}")
    return 0
