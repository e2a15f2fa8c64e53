"""A permutation without a table: the sample at a position of an epoch's order is computed when it is asked for."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT = np.uint64(31)


class Permutation:
    """A pseudorandom permutation of the numbers below `samples`, the same on every rank and machine.

    It is a Feistel network over two digits of equal base, whose square is just large enough. A round adds to a digit
    a hash of the other digit. Subtracting would undo it, so no two positions have the same sample. A result that is no
    sample is permuted again until it is a sample (cycle walking), which happens to about 2 in √`samples` positions.

    Args:
        seed: determines the order; None is the identity, which has no rounds.
        modulo: of the numbers, their remainders are the samples, so that each comes several times.
    """

    def __init__(self, samples: int, seed: int | None, modulo: int | None = None) -> None:
        self._modulo = np.uint64(modulo or samples or 1)
        self._samples, self._base = samples, math.isqrt(max(samples - 1, 0)) + 1
        rounds = 0 if seed is None else _ROUNDS
        self._keys = np.random.SeedSequence(seed or 0).generate_state(rounds, np.uint64)

    def __len__(self) -> int:
        return self._samples

    def at(self, positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return the samples at these positions."""
        high, low = np.divmod(positions, np.uint64(self._base))
        for key in self._keys:
            high, low = low, (high + _hash(low ^ key)) % np.uint64(self._base)
        samples = high * np.uint64(self._base) + low
        beyond = samples >= self._samples
        if beyond.any():
            samples[beyond] = self.at(samples[beyond])
        return samples % self._modulo


def _hash(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return 63-bit numbers, each bit of which depends on all bits of the hashed number."""
    for multiplier in _MULTIPLIERS:
        numbers = numbers * multiplier
        numbers ^= numbers >> _SHIFT
    return numbers >> np.uint64(1)  # so that a digit can be added
