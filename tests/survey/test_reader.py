"""Windows equal plain indexing plus mask, whatever the chunks, the cache and the threads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfm.survey.mdio import Survey, open_survey
from sfm.survey.reader import WindowReader
from sfm.survey.statistics import Statistics, estimate
from sfm.survey.store import SurveyError
from tests.survey.conftest import write_v0, write_v1

STATISTICS = Statistics(low=-1.5, high=2.0, mean=0.25, std=0.75, live_share=1.0)


def expected(survey: Survey, statistics: Statistics, origin: tuple, shape: tuple) -> np.ndarray:
    """The plain way: index the whole array, mask, clip, scale."""
    whole = np.asarray(survey.array[...]).astype(np.float32)
    whole[~np.isfinite(whole)] = np.nan
    whole[~survey.trace_mask] = np.nan
    low, high, mean, std = (np.float32(v) for v in (statistics.low, statistics.high, statistics.mean, statistics.std))
    whole = (np.clip(whole, low, high) - mean) / std
    return whole[tuple(slice(o, o + n) for o, n in zip(origin, shape, strict=True))]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_plain_indexing(data: st.DataObject) -> None:
    size = st.integers(1, 13)
    shape = data.draw(st.tuples(size, size, size))
    chunks = data.draw(st.tuples(*[st.integers(1, n) for n in shape]))
    dtype = data.draw(st.sampled_from(["<f4", ">f4", "<f8", "<i2"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = (rng.standard_normal(shape) * 2).astype(dtype)
    if values.dtype.kind == "f":
        values[rng.random(shape) < 0.05] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    mask = rng.random(shape[:2]) < 0.8
    version = data.draw(st.sampled_from(["v0", "v1", "v1-zarr2"]))
    with tempfile.TemporaryDirectory() as folder:
        if version == "v0":
            url = write_v0(Path(folder, "s"), values, mask, chunks)
        else:
            url = write_v1(Path(folder, "s"), values, mask, chunks, zarr_format=2 if version.endswith("2") else 3)
        survey = open_survey(url)
        assert survey.chunks == chunks
        assert survey.version == version[:2]
        reader = WindowReader(survey, STATISTICS, data.draw(st.sampled_from([0, 100, 1000, 2**20])), threads=3)
        for _ in range(4):
            window = data.draw(st.tuples(*[st.integers(1, n) for n in shape]))
            origin = data.draw(st.tuples(*[st.integers(0, n - w) for n, w in zip(shape, window, strict=True)]))
            got = reader.read(origin, window)
            assert got.dtype == np.float32
            assert got.flags.c_contiguous
            np.testing.assert_array_equal(got, expected(survey, STATISTICS, origin, window))
        reader.close()


@pytest.fixture
def survey(tmp_path: Path) -> Survey:
    rng = np.random.default_rng(0)
    mask = np.ones((12, 15), bool)
    mask[3, 4] = mask[0] = False
    return open_survey(write_v1(tmp_path / "s.mdio", rng.standard_normal((12, 15, 18)).astype("f4"), mask))


def test_second_look_costs_nothing(survey: Survey) -> None:
    reader = WindowReader(survey, STATISTICS)
    reader.read((0, 0, 0), (5, 6, 7))
    assert (reader.cache_hits, reader.cache_misses, reader.bytes_read) == (0, 8, 8 * 4 * 5 * 6 * 4)
    reader.read((1, 1, 1), (5, 6, 7))
    assert (reader.cache_hits, reader.cache_misses, reader.bytes_read) == (8, 8, 8 * 4 * 5 * 6 * 4)


def test_cache_keeps_the_recently_used_within_its_budget(survey: Survey) -> None:
    chunk = 4 * 5 * 6 * 4
    reader = WindowReader(survey, STATISTICS, cache_bytes=2 * chunk)
    for place in (0, 6, 0, 12, 0, 6):  # 6 was used before 12 came, 0 after: 6 had to go
        reader.read((0, 0, place), (4, 5, 6))
    assert (reader.cache_hits, reader.cache_misses) == (2, 4)
    assert reader._kept_bytes <= 2 * chunk


def test_threads_share_a_reader(survey: Survey) -> None:
    reader = WindowReader(survey, STATISTICS, cache_bytes=3000, threads=4)
    rng = np.random.default_rng(1)
    origins = [tuple(int(v) for v in rng.integers(0, (7, 9, 11))) for _ in range(200)]
    with ThreadPoolExecutor(8) as threads:
        for origin, got in zip(origins, threads.map(lambda o: reader.read(o, (5, 6, 7)), origins), strict=True):
            np.testing.assert_array_equal(got, expected(survey, STATISTICS, origin, (5, 6, 7)))


def test_absent_chunks_are_no_data(survey: Survey) -> None:
    for chunk in (Path(survey.url) / "amplitude" / "c").rglob("*"):
        if chunk.is_file():
            chunk.unlink()
    assert np.isnan(WindowReader(survey, STATISTICS).read((1, 0, 0), (5, 6, 7))).all()


def test_damaged_chunk_is_named_and_may_heal(survey: Survey) -> None:
    path = Path(survey.url) / "amplitude" / "c" / "1" / "2" / "0"
    whole = path.read_bytes()
    reader = WindowReader(survey, STATISTICS)
    for damaged in (whole[: len(whole) // 2], b"", b"x" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(SurveyError, match=r"s\.mdio: chunk \(1, 2, 0\) cannot be read: .*ingest the survey again"):
            reader.read((2, 3, 0), (4, 9, 6))
    path.write_bytes(whole)
    np.testing.assert_array_equal(reader.read((2, 3, 0), (4, 9, 6)), expected(survey, STATISTICS, (2, 3, 0), (4, 9, 6)))


def test_window_that_leaves_the_survey(survey: Survey) -> None:
    with pytest.raises(
        SurveyError, match=r"a window of 6 from 10 along crossline leaves the survey, which has 15 there"
    ):
        WindowReader(survey, STATISTICS).read((0, 10, 0), (4, 6, 4))


@pytest.mark.parametrize("name", ["reef3d_v0.mdio.tar.gz", "cube75x71_v1_zarr2.mdio.tar.gz"])
def test_real_surveys(unpacked: Callable[[str], Path], name: str) -> None:
    survey = open_survey(str(unpacked(name)))
    statistics = estimate(survey)
    reader = WindowReader(survey, statistics)
    origin = (3, 5, 2)
    shape = (70, 60, 20)
    np.testing.assert_array_equal(reader.read(origin, shape), expected(survey, statistics, origin, shape))


def test_a_trace_of_zeros_has_no_data(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(6, 7, 40)).astype(np.float32)
    values[2, 3] = 0  # dead from top to bottom
    values[4, 5, :20] = 0  # muted above sample 20
    values[1, 1, 5] = 0  # a zero crossing
    survey = open_survey(write_v1(tmp_path / "zeros.mdio", values, np.ones((6, 7), bool), (4, 4, 20)))
    found = WindowReader(survey, Statistics(-9, 9, 0, 1, 1)).read((0, 0, 0), values.shape)
    expected = values.copy()
    expected[2, 3] = np.nan
    expected[4, 5, :20] = np.nan
    np.testing.assert_array_equal(found, expected)
