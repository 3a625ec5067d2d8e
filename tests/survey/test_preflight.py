"""A job that cannot be fed is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sfm.spec import JobSpec, SfmError, parse_spec
from sfm.survey.preflight import check, open_all, sampler_of
from tests.survey.conftest import write_v1
from tests.survey.test_copies import add_copy


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


def test_aligned_windows_keep_to_the_amplitudes(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((24, 24, 24)).astype("f4")
    url = write_v1(tmp_path / "c.mdio", values, chunks=(8, 8, 8))
    add_copy(url, "fast_inline", values)
    job = spec(url, shape=[8, 24, 24], align=True, held_out=0)
    for slab in ((8, 24, 24), (1, 24, 24)):  # of ranks
        surveys = open_all(job, slab)
        plan = sampler_of(job, surveys)
        assert surveys[0].array.path == "amplitude"
        assert {plan.train(n).origin[0] for n in range(50)} == {0, 8, 16}
    anywhere = spec(url, shape=[8, 24, 24], held_out=0)
    assert open_all(anywhere, (1, 24, 24))[0].array.path == "fast_inline"


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


def test_a_survey_with_few_live_traces(tmp_path: Path) -> None:
    mask = np.zeros((12, 12), bool)
    mask[0] = True
    url = write_v1(tmp_path / "bare.mdio", np.zeros((12, 12, 10), "f4"), mask)
    with pytest.raises(
        SfmError, match=r"bare.mdio: window.min_live 0.5 asks .* has more than 25.0%; take window.min_live"
    ):
        check(spec(url, held_out=0, min_live=0.5))
    check(spec(url, held_out=0, min_live=0.25))


def test_a_survey_smaller_than_the_window(url: str) -> None:
    with pytest.raises(
        SfmError, match=r"exceeds the survey's 10 samples; .* or set window.pad to fill up with no data$"
    ):
        check(spec(url, shape=[4, 4, 12]))
    check(spec(url, shape=[4, 4, 12], pad=True))


def test_surveys_for_evaluation_alone(url: str) -> None:
    job = spec(url, url, held_out=0)
    assert not job.evaluates
    job = parse_spec({**job.model_dump(), "surveys": [{"url": url}, {"url": url, "held_out": True, "weight": 9}]})
    assert job.evaluates
    sampler = sampler_of(job, open_all(job))
    assert {sampler.train(n).survey for n in range(30)} == {0}
    assert {sampler.evaluation(n).survey for n in range(sampler.n_evaluation)} == {1}
    with pytest.raises(
        SfmError, match=r"^surveys: every survey is held_out for evaluation, which leaves none for training"
    ):
        parse_spec({**job.model_dump(), "surveys": [{"url": url, "held_out": True}]})


def test_what_a_spec_says_of_windows_decides_the_order(tmp_path: Path) -> None:
    url = write_v1(tmp_path / "wide.mdio", np.zeros((6, 24, 10), "f4"))
    fields = [{}, {"held_out": 0.4}, {"guard": 1}, {"shape": [2, 4, 8]}, {"blocks": 2}]
    jobs = [spec(url, **each) for each in fields]
    assert len({sampler_of(job, open_all(job)).plan for job in jobs}) == len(fields)
