"""Statistics come from live, finite voxels, the same every time."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sfm.survey import statistics
from sfm.survey.clients import SurveyError
from sfm.survey.mdio import open_survey
from sfm.survey.statistics import PERCENTS, Distribution, Statistics, disagreements, estimate, examine
from tests.survey.conftest import write_v0, write_v1


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_equals_plain_numpy(tmp_path: Path, version: str) -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((13, 17, 40)) * 3 + 1).astype("f4")
    mask = rng.random((13, 17)) < 0.6
    values[2, 3, 4], values[5, 6, 7] = np.nan, np.inf
    survey = open_survey((write_v1 if version == "v1" else write_v0)(tmp_path / "s.mdio", values, mask))
    seen: list[tuple[int, int]] = []
    got = estimate(survey, clip=99, max_chunks=1000, progress=lambda done, total: seen.append((done, total)))
    live = values[mask]
    live = live[np.isfinite(live)]
    low, high = np.percentile(live, [0.5, 99.5])
    clipped = np.clip(live, low, high).astype("f8")
    assert (got.low, got.high) == pytest.approx((low, high))
    assert (got.mean, got.std) == pytest.approx((clipped.mean(), clipped.std()), rel=1e-6)
    assert got.live_share == mask.mean()
    assert seen[-1] == (len(seen), len(seen))


def test_samples_are_deterministic_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).standard_normal((16, 20, 30)).astype("f4")
    survey = open_survey(write_v1(tmp_path / "s.mdio", values))
    monkeypatch.setattr(statistics, "_MOST_VOXELS", 600)
    first = estimate(survey, max_chunks=8)
    assert estimate(survey, max_chunks=8) == first
    assert estimate(survey, max_chunks=8, seed=1) != first
    assert first.std == pytest.approx(1, abs=0.1)


def test_round_trip_through_json() -> None:
    one = Statistics(-1.0, 2.0, 0.5, 0.25, 1.0)
    assert Statistics.from_json(one.to_json()) == one


def test_empty_survey(tmp_path: Path) -> None:
    values = np.ones((4, 4, 4), "f4")
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, np.zeros((4, 4), bool)))
    with pytest.raises(
        SurveyError, match=r"s.mdio: no live trace holds a finite amplitude in 0 chunks; the survey is empty"
    ):
        estimate(survey)


def test_constant_survey(tmp_path: Path) -> None:
    survey = open_survey(write_v1(tmp_path / "s.mdio", np.full((4, 4, 4), 7, "f4")))
    with pytest.raises(
        SurveyError, match=r"the amplitudes within the central 99.5 percent are all 7; there is nothing to learn"
    ):
        estimate(survey)


def test_distribution_equals_plain_numpy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((13, 17, 40)) * 3 + 1000).astype("f4")
    values[..., :10] = 0  # a mute: zeros on live traces, chunks full of them
    mask = rng.random((13, 17)) < 0.9
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, mask, chunks=(4, 5, 5)))
    _, got = examine(survey, max_chunks=1000)
    live = values[mask].astype("f8")
    assert list(got.percentiles) == list(PERCENTS)
    assert [got.percentiles[p] for p in (50, 99.9)] == pytest.approx(np.percentile(live, [50, 99.9]), rel=1e-6)
    assert (got.minimum, got.maximum) == (live.min(), live.max())
    assert (got.mean, got.std) == pytest.approx((live[live != 0].mean(), live[live != 0].std()), rel=1e-6)
    assert (got.zeros, got.with_data) == (pytest.approx(0.25), 1)
    assert (got.live_traces, got.live_voxels, got.voxels) == (mask.mean(), live.size, live.size)
    assert (got.chunks, got.chunks_in_all) == (4 * 4 * 8, 4 * 4 * 8)
    _, few = examine(survey, max_chunks=40)
    assert (few.chunks, few.chunks_in_all, few.live_voxels) == (40, 4 * 4 * 8, live.size)
    assert few.mean == pytest.approx(1000, abs=1)


def test_estimate_ends_its_threads(tmp_path: Path) -> None:
    survey = open_survey(write_v1(tmp_path / "s.mdio", np.random.default_rng(0).random((8, 8, 8), "f4")))
    before = threading.active_count()
    estimate(survey)
    assert threading.active_count() == before
    (Path(survey.url) / "amplitude/c/0/0/0").write_bytes(b"x")
    with pytest.raises(SurveyError, match=r"chunk \(0, 0, 0\) cannot be read"):
        estimate(survey)
    assert threading.active_count() == before


SEEN = Distribution(
    percentiles=dict(zip(PERCENTS, (-31, -28, -23, -16, -7, 0, 7, 16, 23, 28, 31), strict=True)),
    minimum=-45.0,
    maximum=44.0,
    mean=0.1,
    std=10.0,
    zeros=0.2,
    with_data=1.0,
    live_traces=0.9,
    live_voxels=1_000_000,
    voxels=10_000,
    chunks=8,
    chunks_in_all=80,
)
RIGHT = {"count": 800_000, "min": -60.0, "max": 61.0, "mean": 0.0, "std": 11.0}


def test_stored_statistics_that_may_be_right() -> None:
    assert disagreements(SEEN, RIGHT) == []
    assert disagreements(SEEN, None) == []
    assert disagreements(SEEN, {"mean": 0.0, "std": 9.0, "max": None, "rms": 9.0}) == []
    assert disagreements(SEEN, {**RIGHT, "max": 43.0}) == []  # what lossy compression may do
    above = replace(SEEN, minimum=3.0)
    assert disagreements(above, {**RIGHT, "min": -1.0}) == []
    carried = replace(SEEN, with_data=0.3, zeros=0.0)  # most live traces are zeros all through, and not counted
    assert disagreements(carried, {**RIGHT, "count": 290_000}) == []


@pytest.mark.parametrize(
    ("stored", "sentence"),
    [
        ({"max": 0.0}, "stored max 0 is wrong: more than 0.25 % of the amplitudes lie above it, highest 44"),
        ({"max": -3.5}, "stored max -3.5 is wrong: more than 0.25 % of the amplitudes lie above it, highest 44"),
        ({"max": 30.0}, "stored max 30 is wrong: some of the amplitudes lie above it, highest 44"),
        ({"min": -20.0}, "stored min -20 is wrong: more than 0.25 % of the amplitudes lie below it, lowest -45"),
        ({"std": 5.0}, "stored std 5 is 0.5 times the measured 10"),
        ({"std": 14.0}, "stored std 14 is 1.4 times the measured 10"),
        ({"std": 0.0}, "stored std 0 is 0 times the measured 10"),
        ({"mean": -5.0}, "stored mean -5 is 0.51 standard deviations away from the measured 0.1"),
        (
            {"count": 1_100_000},
            "stored count 1,100,000 is more than the 1,000,000 voxels on live traces: dead ones wer",
        ),
        ({"count": 1_000_000}, "stored count 1,000,000 includes zeros or NaN, which are 20% of the live voxels read"),
        ({"count": 4}, "stored count 4 covers 4e-06 of the 1,000,000 voxels on live traces"),
    ],
)
def test_stored_statistics_that_cannot_be_right(stored: dict, sentence: str) -> None:
    (said,) = disagreements(SEEN, {**RIGHT, **stored})
    assert said.startswith(sentence)


def test_extremes_that_straddle_zero_where_amplitudes_do_not() -> None:
    seen = replace(SEEN, minimum=1500.0, maximum=4500.0, percentiles=dict.fromkeys(PERCENTS, 2000.0), mean=2000.0)
    stored = {"min": 0.0, "max": 5000.0, "mean": 2000.0}
    assert disagreements(seen, stored) == [
        "stored min 0 is where MDIO starts to count: the lowest amplitude read is 1500"
    ]
