"""A job that cannot be fed is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sfm.spec import JobSpec, SfmError, parse_spec
from sfm.survey.preflight import check, open_all
from tests.survey.conftest import write_v1


def spec(*urls: str, **window: object) -> JobSpec:
    return parse_spec(
        {
            "surveys": [{"url": url} for url in urls],
            "window": {"shape": [4, 4, 8], **window},
            "model": {"preset": "tiny", "patch": [2, 2, 4]},
            "batch": {"size": 2},
        }
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    return write_v1(tmp_path / "s.mdio", np.zeros((6, 12, 10), "f4"))


def test_passes(url: str) -> None:
    check(spec(url, url))
    assert [s.shape for s in open_all(spec(url, url))] == [(6, 12, 10)] * 2


def test_missing_survey(url: str) -> None:
    with pytest.raises(SfmError, match=r"no survey at .*other"):
        check(spec(url, url + "other"))


def test_window_does_not_fit(url: str) -> None:
    with pytest.raises(
        SfmError, match=r"s.mdio: window.shape 12 along sample exceeds the survey's 10 samples; take at most 10"
    ):
        check(spec(url, shape=[4, 4, 12]))


def test_no_room_to_hold_out(url: str) -> None:
    with pytest.raises(
        SfmError, match=r"s.mdio: 6 inlines do not hold a window.shape of 6 .* or set window.held_out to 0"
    ):
        check(spec(url, shape=[6, 8, 8]))
