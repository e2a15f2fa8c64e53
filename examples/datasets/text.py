"""Lines of text files as sequences of bytes, for a model that predicts the next byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from trainer import DataError

VOCABULARY = 256
"""Bytes. No text has byte 0, which fills the inputs of short lines."""
PADDING = -100
"""Target that counts for nothing; `cross_entropy` leaves it out."""
LONGEST = 128
"""Bytes of a line; longer ones are cut."""

SOME_TEXT = [Path(__file__).resolve().parents[2] / name for name in ("LICENSE", "README.md")]
"""Files that are there in every checkout and image."""

Sample = Mapping[str, Tensor]


class Lines(Dataset[Sample]):
    """Each sample is a line: `inputs` are its bytes, `targets` the bytes that follow them; int64, shape (bytes,).

    Args:
        lines: of which none is empty.
    """

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Sample:
        line = torch.tensor([*self._lines[index][:LONGEST], ord("\n")])
        return {"inputs": line[:-1], "targets": line[1:]}


def load_lines(files: Sequence[Path]) -> tuple[Lines, Lines]:
    """Return the lines of text files: nine of ten for training, each tenth for testing.

    Raises:
        DataError: a file cannot be read, or they have fewer than 100 lines.
    """
    lines: list[bytes] = []
    for file in files:
        try:
            lines += [line for line in file.read_bytes().splitlines() if line.strip()]
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    if len(lines) < 100:
        raise DataError(f"{', '.join(map(str, files))}: {len(lines)} lines of text; it takes at least 100")
    return Lines([line for number, line in enumerate(lines) if number % 10]), Lines(lines[::10])


def pad(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Collate lines of different lengths into `inputs` and `targets` of shape (lines, bytes of the longest)."""
    return {
        "inputs": pad_sequence([sample["inputs"] for sample in samples], batch_first=True),
        "targets": pad_sequence([sample["targets"] for sample in samples], batch_first=True, padding_value=PADDING),
    }


def count_tokens(batch: Sample) -> int:
    """Return the bytes of a batch that are to be predicted, those that fill short lines left out."""
    return int((batch["targets"] != PADDING).sum())
