"""Statistics come from live, finite voxels, the same every time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sfm.survey import statistics
from sfm.survey.clients import SurveyError
from sfm.survey.mdio import open_survey
from sfm.survey.statistics import Statistics, estimate
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
