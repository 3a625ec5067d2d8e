"""The plan of samples: pure, seekable, and never training on what is held out."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sfm.survey.sampler import Sampler, split
from sfm.survey.store import SurveyError

SHAPES = [(76, 181, 268), (200, 40, 100)]


def sampler(**changes: object) -> Sampler:
    arguments = {"shapes": SHAPES, "weights": [3.0, 1.0], "window": (16, 16, 64), "held_out": 0.1, "seed": 7}
    return Sampler(**{**arguments, **changes})


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_held_out_voxels_are_never_trained_on(data: st.DataObject) -> None:
    window = data.draw(st.tuples(*[st.integers(1, 9)] * 3))
    shape = data.draw(st.tuples(*[st.integers(w, 60) for w in window]))
    held_out = data.draw(st.floats(0.01, 0.5))
    try:
        plan = Sampler([shape], [1.0], window, held_out, data.draw(st.integers(0, 2**63 - 1)))
    except SurveyError:
        assume(False)
    axis, training, held = plan.splits[0]
    assert training + held == shape[axis]
    assert held >= max(window[axis], math.ceil(round(held_out * shape[axis], 6)))
    for index in data.draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=20)):
        origin = plan.train(index).origin
        assert all(0 <= o <= n - w for o, n, w in zip(origin, shape, window, strict=True))
        assert origin[axis] + window[axis] <= training
    seen = [plan.evaluation(n).origin for n in range(plan.n_evaluation)]
    assert len(set(seen)) == plan.n_evaluation
    assert plan.n_evaluation >= 1
    for origin in seen:
        assert origin[axis] >= training
        assert all(0 <= o <= n - w for o, n, w in zip(origin, shape, window, strict=True))
    some = seen[:40]
    for n, one in enumerate(some):  # no two overlap
        for other in some[:n]:
            assert any(abs(a - b) >= w for a, b, w in zip(one, other, window, strict=True))


def test_order_is_a_pure_function_of_seed_and_index() -> None:
    first, again = sampler(), sampler()
    order = [first.train(n) for n in range(100)]
    assert [again.train(n) for n in reversed(range(100))] == order[::-1]
    assert [sampler(seed=8).train(n) for n in range(100)] != order
    assert order[5].index == 5
    assert order[5].key == (7, 0, 5)


def test_order_is_the_same_everywhere_and_for_ever() -> None:
    # A resumed job must meet the same windows on any machine and any numpy.
    assert [(s.survey, s.origin) for s in map(sampler().train, (0, 1, 10**12))] == PINNED


PINNED = [(1, (48, 10, 14)), (1, (139, 2, 23)), (0, (25, 82, 175))]


def test_weights_and_places_are_uniform() -> None:
    plan = sampler()
    samples = [plan.train(n) for n in range(8000)]
    counts = Counter(s.survey for s in samples)
    assert counts[0] / 8000 == pytest.approx(0.75, abs=0.02)
    depths = np.array([s.origin[2] for s in samples if s.survey == 0])
    assert (depths.min(), depths.max()) == (0, 268 - 64)
    assert depths.mean() == pytest.approx((268 - 64) / 2, abs=4)


def test_first_evaluation_windows_are_spread_out() -> None:
    plan = sampler(shapes=SHAPES[:1], weights=[1])
    origins = np.array([plan.evaluation(n).origin for n in range(8)])
    assert len(set(origins[:, 2])) == 4  # all four depths
    assert len(set(origins[:, 0])) >= 3
    assert plan.evaluation(3).key == (7, 1, 3)


def test_splits_along_the_axis_with_most_windows() -> None:
    assert split((76, 181, 268), (32, 32, 128), 0.1, "s") == (1, 149, 32)
    assert split((64, 64, 64), (32, 32, 32), 0.1, "s") == (0, 32, 32)  # ties: inline
    assert split((1000, 64, 64), (32, 32, 32), 0.1, "s") == (0, 900, 100)


def test_description() -> None:
    assert sampler(names=["a.mdio", "b.mdio"]).describe() == (
        "a.mdio: crosslines 1-162 of 181 are for training, the last 19 are held out (16 evaluation windows). "
        "b.mdio: inlines 1-180 of 200 are for training, the last 20 are held out (2 evaluation windows)."
    )
    assert "all 76 inlines x 181 crosslines are for training, nothing is held out" in sampler(held_out=0).describe()


def test_nothing_held_out() -> None:
    plan = sampler(held_out=0)
    assert plan.n_evaluation == 0
    with pytest.raises(SurveyError, match=r"window\.held_out is 0: no lines are kept for evaluation"):
        plan.evaluation(0)


def test_evaluation_past_the_end() -> None:
    with pytest.raises(SurveyError, match=r"there are 18 evaluation windows; number 18 is not among them"):
        sampler().evaluation(18)


def test_window_larger_than_survey() -> None:
    with pytest.raises(
        SurveyError, match=r"survey 1: window.shape 64 along crossline exceeds the survey's 40 crosslines; take"
    ):
        sampler(window=(16, 64, 64))


def test_too_small_for_training_and_evaluation() -> None:
    with pytest.raises(
        SurveyError,
        match=r"s: 76 inlines do not hold a window.shape of 64 for training beside 64 inlines held out for evaluation; "
        r"take at most 38 there, or set window.held_out to 0",
    ):
        split((76, 76, 100), (64, 64, 64), 0.1, "s")
    with pytest.raises(
        SurveyError, match=r"s: 1 inlines do not hold a window.shape of 1 .*evaluation; set window.held_out to 0"
    ):
        split((1, 1, 9), (1, 1, 9), 0.1, "s")
