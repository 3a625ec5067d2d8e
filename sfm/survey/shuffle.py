"""Random bits and permutations that are pure functions of their keys, in constant memory and time.

All randomness is raw bits of numpy's counter-based Philox generator, mapped by hand: numpy may change how its own
distributions use them.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

_DOMAIN = 0x77696E646F77  # keeps the windows' random numbers apart from other uses of the same seed
_SMALL = 256  # up to here permutations are kept whole
_ROUNDS = 8
_WORD = (1 << 64) - 1


def random_bits(seed: int, stream: int, where: tuple[int, int], count: int) -> np.ndarray:
    """`count` words of 64 random bits, uint64."""
    return np.random.Philox(key=[seed, stream], counter=[0, *where, _DOMAIN]).random_raw(count)


def permuted(place: int, size: int, seed: int, stream: int, where: tuple[int, int]) -> int:
    """Where `place` of `size` goes in the permutation that (seed, stream, where) names.

    Small ones are a sort of random keys; large ones a Feistel network on pairs of digits, walked until it comes
    back into the range (Black & Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    if size <= _SMALL:
        return _order(size, seed, stream, where)[place]
    keys, side = _keys(seed, stream, where), math.isqrt(size - 1) + 1
    while True:
        left, right = divmod(place, side)
        for key in keys:
            left, right = right, (left + _mixed(right ^ key)) % side
        place = left * side + right
        if place < size:
            return place


@lru_cache(maxsize=256)
def _order(size: int, seed: int, stream: int, where: tuple[int, int]) -> tuple[int, ...]:
    return tuple(np.argsort(random_bits(seed, stream, where, size), kind="stable").tolist())


@lru_cache(maxsize=1024)
def _keys(seed: int, stream: int, where: tuple[int, int]) -> tuple[int, ...]:
    return tuple(random_bits(seed, stream, where, _ROUNDS).tolist())


def _mixed(word: int) -> int:
    """A 64-bit word with its bits stirred (the last steps of SplitMix64; Steele, Lea & Flood 2014)."""
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _WORD
    return word ^ word >> 31
