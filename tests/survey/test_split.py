"""The lines of a survey: training, guard and evaluation apart, in blocks; and windows that cover a stretch."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfm.spec import Window
from sfm.survey.clients import SurveyError
from sfm.survey.split import Lines, Split, cover, split, tiles


def lines(parts: tuple[Lines, ...]) -> np.ndarray:
    return np.concatenate([np.arange(first, first + size) for first, size in parts])


def test_splits_along_the_axis_with_most_windows() -> None:
    def of(shape: tuple[int, int, int]) -> Split:
        return split(shape, Window(shape=(32, 32, 32)), "s")

    assert of((76, 181, 268)) == (1, ((0, 149),), ((149, 32),))
    assert of((64, 64, 64)) == (0, ((0, 32),), ((32, 32),))  # ties: inline
    assert of((1000, 64, 64)) == (0, ((0, 900),), ((900, 100),))


def test_blocks_and_guard() -> None:
    window = Window(shape=(4, 4, 4), held_out=0.2, blocks=3, guard=2)
    assert split((100, 10, 10), window, "s") == (0, ((0, 22), (33, 22), (66, 25)), ((24, 7), (57, 7), (93, 7)))
    assert split((100, 10, 10), window, "s", held_out=True) == (0, (), ((0, 100),))
    assert split((100, 10, 10), window.model_copy(update={"held_out": 0.0}), "s") == (0, ((0, 100),), ())


def test_training_guard_and_evaluation_are_disjoint() -> None:
    rng = np.random.default_rng(0)
    for _ in range(4000):
        need, size = int(rng.integers(1, 9)), int(rng.integers(9, 120))
        share, blocks, guard = float(rng.uniform(0.01, 0.5)), int(rng.integers(1, 5)), int(rng.integers(0, 7))
        window = Window(shape=(need, 200, 1), held_out=share, blocks=blocks, guard=guard, pad=True)
        try:
            axis, training, held_out = split((size, 150, 1), window, "s")
        except SurveyError:
            continue
        assert axis == 0
        assert len(training) == len(held_out) == blocks
        trained, tested = lines(training), lines(held_out)
        everything = np.concatenate([trained, tested])
        assert len(np.unique(everything)) == len(everything)
        assert (everything.min(), everything.max()) == (0, size - 1)
        assert np.abs(trained[:, None] - tested).min() == guard + 1
        assert size - len(everything) == guard * (2 * blocks - 1)
        assert min(part.size for part in training + held_out) >= need
        assert len(tested) >= max(blocks * need, math.ceil(round(share * size, 6)))
        if blocks == 1 and not guard:
            kept = max(need, math.ceil(round(share * size, 6)))
            assert (training, held_out) == (((0, size - kept),), ((size - kept, kept),))


OFFERS = {
    r"at most (\d+) there": lambda n: {"shape": (n, 1, 1)},
    r"window\.blocks at most (\d+)": lambda n: {"blocks": n},
    r"window\.guard at most (\d+)": lambda n: {"guard": n},
    r"window\.held_out to (0)$": lambda n: {"held_out": float(n)},
}


def test_every_offer_of_a_refusal_can_be_followed_and_none_is_modest() -> None:
    rng, followed = np.random.default_rng(1), dict.fromkeys(OFFERS, 0)
    for _ in range(800):
        size = int(rng.integers(1, 60))
        window = Window(
            shape=(int(rng.integers(1, 50)), 1, 1), held_out=float(rng.uniform(0.01, 0.5)), pad=True,
            blocks=int(rng.integers(1, 8)), guard=int(rng.integers(0, 20)),
        )  # fmt: skip
        try:
            split((size, 1, 1), window, "s")
        except SurveyError as error:
            for pattern, change in OFFERS.items():
                for found in re.findall(pattern, str(error)):
                    followed[pattern] += 1
                    split((size, 1, 1), window.model_copy(update=change(int(found))), "s")
                    more = window.model_copy(update=change(int(found) + 1))
                    if more.held_out != 1:
                        with pytest.raises(SurveyError):
                            split((size, 1, 1), more, "s")
    assert min(followed.values()) > 50


def test_refusals() -> None:
    with pytest.raises(
        SurveyError, match=r"^s: window.shape 64 along crossline exceeds the survey's 40 crosslines; take "
    ):
        split((200, 40, 100), Window(shape=(16, 64, 64)), "s")
    with pytest.raises(
        SurveyError,
        match=r"^s: 76 inlines do not hold a window.shape of 64 for training beside 64 inlines held out for "
        r"evaluation; take at most 38 there, or set window.held_out to 0$",
    ):
        split((76, 76, 100), Window(shape=(64, 64, 64)), "s")
    with pytest.raises(SurveyError, match=r"^s: 1 inlines do not hold .*evaluation; set window.held_out to 0$"):
        split((1, 1, 9), Window(shape=(1, 1, 9)), "s")
    with pytest.raises(
        SurveyError,
        match=r"^s: 100 inlines, cut in 3 \(window.blocks\), do not hold a window.shape of 16 for training beside 16 "
        r"inlines held out for evaluation with 2 between them \(window.guard\); take at most 14 there, or take "
        r"window.blocks at most 2, or take window.guard at most 0, or set window.held_out to 0$",
    ):
        split((100, 16, 1), Window(shape=(16, 16, 1), blocks=3, guard=2), "s")
    with pytest.raises(
        SurveyError,
        match=r"^s: 10 inlines, fewer than window.shape 16, leave none to hold out beside padded windows; take at "
        r"most 5 there, or set window.held_out to 0$",
    ):
        split((10, 10, 1), Window(shape=(16, 16, 1), pad=True), "s")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_tiles_cover_all_with_the_fewest_windows(data: st.DataObject) -> None:
    size, need = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 50))
    overlap = data.draw(st.integers(0, need - 1))
    origins = cover(size, need, overlap)
    if size <= need:
        assert origins == [0]
        return
    assert (origins[0], origins[-1]) == (0, size - need)
    steps = np.diff(origins)
    assert 1 <= steps.min() <= steps.max() <= need - overlap
    assert steps.max() - steps.min() <= 1  # evenly spread
    assert len(origins) == math.ceil((size - overlap) / (need - overlap))
    if size % need == 0 and not overlap:
        assert set(steps) == {need}


def test_tiles_of_a_survey() -> None:
    assert tiles((10, 4, 3), (4, 4, 8)) == ([0, 3, 6], [0], [0])
    assert tiles((8, 8, 8), (4, 4, 4), 2) == ([0, 2, 4],) * 3
    with pytest.raises(SurveyError, match=r"^windows of 4 x 2 x 8 voxels cannot overlap by 2; take 0 to 1$"):
        tiles((8, 8, 8), (4, 2, 8), 2)
