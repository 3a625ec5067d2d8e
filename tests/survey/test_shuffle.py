"""Permutations without memory: each is one, and over keys any is as likely as another."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from sfm.survey.shuffle import permuted, random_bits


@pytest.mark.parametrize("size", [1, 2, 3, 17, 255, 256, 257, 258, 288, 289, 290, 1000, 10_007])
def test_every_place_is_met_once(size: int) -> None:
    orders = [[permuted(place, size, 5, 0, (turn, 1)) for place in range(size)] for turn in range(2)]
    assert [sorted(order) for order in orders] == [list(range(size))] * 2
    if size > 3:
        assert orders[0] != orders[1] != list(range(size))


def excess(counts: np.ndarray, expected: float) -> float:
    """Chi-square in standard deviations from what chance gives."""
    freedom = counts.size - 1
    return (float(((counts - expected) ** 2).sum()) / expected - freedom) / math.sqrt(2 * freedom)


def test_small_permutations_are_uniform() -> None:
    seen = Counter(tuple(permuted(p, 4, 7, 1, (turn, 0)) for p in range(4)) for turn in range(4800))
    assert abs(excess(np.array([seen[order] for order in itertools.permutations(range(4))]), 200)) < 4


def test_large_permutations_spread_places_and_neighbours() -> None:
    size, keys = 300, 6000
    first = [(permuted(0, size, 7, 1, (turn, 0)), permuted(1, size, 7, 1, (turn, 0))) for turn in range(keys)]
    assert abs(excess(np.bincount([a for a, _ in first], minlength=size), keys / size)) < 4
    apart = np.bincount([(b - a) % size for a, b in first], minlength=size)
    assert apart[0] == 0
    assert abs(excess(apart[1:], keys / (size - 1))) < 4
    one_key = [permuted(p, 10**7, 7, 1, (0, 0)) for p in range(20_000)]
    assert abs(excess(np.bincount(np.array(one_key) * 100 // 10**7, minlength=100), 200)) < 4


def test_the_same_everywhere_and_for_ever() -> None:
    assert random_bits(1, 2, (3, 4), 2).tolist() == BITS
    assert [permuted(p, 10, 1, 2, (3, 4)) for p in range(10)] == SMALL
    assert [permuted(p, 10**9, 1, 2, (3, 4)) for p in range(3)] == LARGE


BITS = [12410768779275285933, 13742181811460844434]
SMALL = [8, 4, 5, 2, 3, 0, 1, 7, 9, 6]
LARGE = [224921359, 31089790, 645922962]
