"""Windows equal plain indexing plus mask, whatever the format, codec, chunks, cache, threads and client."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import google_crc32c
import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec

from sfm.survey import blosc, layout
from sfm.survey.cache import DiskCache
from sfm.survey.clients import SurveyError
from sfm.survey.codecs import ChunkCodec, Payload, _Blosc
from sfm.survey.mdio import Survey, open_survey
from sfm.survey.objects import Objects
from sfm.survey.pacing import Backoff
from sfm.survey.reader import WindowReader
from sfm.survey.scaling import DEAD_SAMPLES
from sfm.survey.statistics import Statistics, estimate
from sfm.survey.transfers import Transfers
from tests.survey.conftest import few_threads, said_by_a_child, write_v0, write_v1

STATISTICS = Statistics(low=-1.5, high=2.0, mean=0.25, std=0.75, live_share=1.0)
HASTY = Backoff(first=0.001, attempts=3)


def plain(survey: Survey, statistics: Statistics | None, origin: tuple, shape: tuple) -> np.ndarray:
    """The plain way: index the whole array, mask, clip, scale. Padded with NaN beyond the survey."""
    region = tuple(slice(o, o + n) for o, n in zip(origin, shape, strict=True))
    with np.errstate(over="ignore"):
        window = np.asarray(survey.array[...]).astype(np.float32)[region]
    zeros = ~window.any(axis=2)
    window[~np.isfinite(window)] = np.nan
    if statistics is not None:
        low, high, mean, std = (np.float32(getattr(statistics, name)) for name in ("low", "high", "mean", "std"))
        window = (np.clip(window, low, high) - mean) / std
    window[~survey.trace_mask[region[:2]]] = np.nan
    if window.shape[2] >= DEAD_SAMPLES:
        window[zeros] = np.nan
    return np.pad(window, [(0, n - m) for n, m in zip(shape, window.shape, strict=True)], constant_values=np.nan)


V3_CODECS: list[dict] = [
    {"compressors": BloscCodec(cname="zstd", clevel=5, shuffle="shuffle")},
    {"compressors": BloscCodec(cname="lz4", shuffle="bitshuffle", blocksize=256)},
    {"compressors": None},
    {"compressors": [ZstdCodec(), Crc32cCodec()]},
    {"compressors": GzipCodec()},
    {"compressors": [BloscCodec(), Crc32cCodec()], "serializer": BytesCodec(endian="big")},
    {"filters": TransposeCodec(order=(2, 0, 1)), "compressors": ZstdCodec()},
]
V2_CODECS: list[dict] = [
    {"compressors": numcodecs.Blosc(cname="zstd", shuffle=-1, blocksize=256)},
    {"compressors": None, "order": "F"},
    {"compressors": numcodecs.Zlib(), "filters": [numcodecs.Delta("f4")]},
    {"compressors": None},
]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_plain_indexing(data: st.DataObject) -> None:
    size = st.integers(1, 24)
    shape = data.draw(st.tuples(size, size, size))
    chunks = data.draw(st.tuples(*[st.integers(1, n) for n in shape]))
    dtype = data.draw(st.sampled_from(["<f4", ">f4", "<f8", "<i2", "<f2", "|i1"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = (rng.standard_normal(shape) * 2).astype(dtype)
    if values.dtype.kind == "f":
        values[rng.random(shape) < 0.05] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    values[rng.random(shape[:2]) < 0.1] = 0
    mask = rng.random(shape[:2]) < 0.8
    version = data.draw(st.sampled_from(["v0", "v1", "v1-zarr2"]))
    options: dict = {}
    if version == "v1":
        options = data.draw(st.sampled_from(V3_CODECS))
    elif dtype == "<f4":
        options = data.draw(st.sampled_from(V2_CODECS))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SMALLEST_SAVING", data.draw(st.sampled_from([1, 500, 2**18])))
        if version == "v0":
            url = write_v0(Path(folder, "s"), values, mask, chunks, **options)
        else:
            url = write_v1(Path(folder, "s"), values, mask, chunks, 2 if version.endswith("2") else 3, **options)
        survey = open_survey(url)
        assert survey.chunks == chunks
        assert survey.version == version[:2]
        disk = DiskCache(Path(folder, "disk"), data.draw(st.sampled_from([0, 1000, 2**20])))
        transfers = Transfers(memory=1000, decoders=2, most=4, disk=data.draw(st.sampled_from([None, disk])))
        statistics = data.draw(st.sampled_from([STATISTICS, None]))
        keep = data.draw(st.sampled_from([True, False, "auto"]))
        reader = WindowReader(
            survey, statistics, transfers, keep=keep, cache_bytes=data.draw(st.sampled_from([0, 1000, 2**20])), pad=True
        )
        for _ in range(4):
            origin = data.draw(st.tuples(*[st.integers(0, n - 1) for n in shape]))
            window = data.draw(st.tuples(*[st.integers(1, n + 3) for n in shape]))
            got = reader.read(origin, window)
            assert got.dtype == np.float32
            assert got.flags.c_contiguous
            np.testing.assert_array_equal(got, plain(survey, statistics, origin, window))
        reader.close()
        transfers.close()


@pytest.mark.parametrize("shards", [(8, 10, 12), (4, 5, 12), (16, 20, 24)])
@pytest.mark.parametrize("codec", [BloscCodec(), None])
def test_shards_are_read_by_ranges(tmp_path: Path, shards: tuple, codec: BloscCodec | None) -> None:
    values = np.random.default_rng(0).standard_normal((13, 20, 22)).astype("f4")
    values[8:12, :10, :12] = np.nan  # chunks that are not stored
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, shards=shards, compressors=codec))
    assert survey.chunks == (4, 5, 6)
    reader = WindowReader(survey, STATISTICS, keep=False)
    rng = np.random.default_rng(1)
    for _ in range(20):
        origin = tuple(int(v) for v in rng.integers(0, (9, 14, 15)))
        shape = tuple(int(v) for v in rng.integers(1, (5, 7, 8)))
        np.testing.assert_array_equal(reader.read(origin, shape), plain(survey, STATISTICS, origin, shape))
    reader.close()


def test_neighbours_in_a_shard_come_in_one_request(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((8, 10, 12)).astype("f4")
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, shards=(8, 10, 12), compressors=None))
    reader = WindowReader(survey, STATISTICS, keep=False)
    reader.read((0, 0, 0), (8, 10, 12))
    first = reader.transfers.meter.now()
    assert first.requests == 2  # the index of the shard, and its eight chunks
    assert first.bytes_fetched == values.nbytes + 8 * 16 + 4
    reader.read((0, 0, 0), (4, 5, 6))
    again = reader.transfers.meter.now().minus(first)
    assert (again.requests, again.bytes_fetched) == (1, 4 * 5 * 6 * 4)
    reader.close()


@pytest.mark.parametrize("keep", [True, False])
def test_a_damaged_chunk_in_a_shard_leaves_the_others(tmp_path: Path, keep: bool) -> None:
    values = np.random.default_rng(0).standard_normal((8, 10, 12)).astype("f4")
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, shards=(8, 10, 12), compressors=BloscCodec()))
    path = Path(survey.url) / "amplitude/c/0/0/0"
    whole = path.read_bytes()
    path.write_bytes(bytes(40) + whole[40:])  # the first of eight
    reader = WindowReader(survey, keep=keep)
    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(reader.read, (0, 0, 0), (8, 10, 12)) for _ in range(8)]:
            with pytest.raises(SurveyError, match=r"chunk \(0, 0, 0\) cannot be read"):
                future.result(30)
    np.testing.assert_array_equal(reader.read((4, 0, 0), (4, 10, 12)), values[4:])
    path.write_bytes(whole)
    np.testing.assert_array_equal(reader.read((0, 0, 0), (8, 10, 12)), values)


@pytest.mark.parametrize("damaged", [(0, 0, 0), (1, 1, 1)])
def test_a_window_does_not_suffer_from_a_chunk_that_only_another_wants(
    tmp_path: Path, damaged: tuple[int, int, int]
) -> None:
    """It waits for a chunk that a window promised which then fails for another chunk's sake."""
    values = np.random.default_rng(0).standard_normal((8, 10, 12)).astype("f4")
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, shards=(4, 10, 12), compressors=BloscCodec()))
    path = Path(survey.url) / f"amplitude/c/{damaged[0]}/0/0"
    whole = path.read_bytes()
    for spoilt in (whole[:-20] + bytes(20), bytes(40) + whole[40:]):  # the index of the shard; its first chunk
        path.write_bytes(spoilt)
        other = 1 - damaged[0]
        for _ in range(30):
            reader = WindowReader(survey, keep=True)
            with ThreadPoolExecutor(4) as threads:
                all_of_it = [threads.submit(reader.read, (0, 0, 0), (8, 10, 12)) for _ in range(2)]
                sound = [threads.submit(reader.read, (4 * other, 0, 0), (4, 10, 12)) for _ in range(2)]
                for future in sound:
                    np.testing.assert_array_equal(future.result(30), values[4 * other : 4 * other + 4])
                for future in all_of_it:
                    assert "cannot be read" in str(future.exception(30))
            reader.close()
    path.write_bytes(whole)


def test_more_shards_than_are_remembered_are_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).standard_normal((8, 10, 12)).astype("f4")
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, shards=(4, 10, 12)))
    monkeypatch.setattr(layout, "_HEADS", 1)
    reader = WindowReader(survey, keep=False)
    np.testing.assert_array_equal(reader.read((0, 0, 0), (4, 10, 12)), values[:4])
    with pytest.raises(
        SurveyError, match=r"s\.mdio: the index of the shard of chunk .* was forgotten; read smaller win"
    ):
        reader.read((0, 0, 0), (8, 10, 12))
    reader.close()


class Spoiling:
    """Objects whose first head of a chunk, and first answer with more of it, are spoilt."""

    def __init__(self, objects: Objects, spoil: Callable[[int, int | None, bytes], bytes]) -> None:
        self.objects, self.spoil = objects, spoil
        self.met: set[tuple[str, bool]] = set()

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        data = self.objects.get(key, start, stop)
        met = key, len(data or b"") < 1000
        if data is None or not key.startswith("amplitude/c/") or met in self.met:
            return data if data is None else bytes(data)
        self.met.add(met)
        return self.spoil(start, stop, bytes(data))

    def any(self) -> bool:
        return self.objects.any()


def bad_magic(start: int, _: int | None, data: bytes) -> bytes:
    return b"\xff" + data[1:] if start == 0 else data


def bad_offsets(start: int, stop: int | None, data: bytes) -> bytes:
    """A head that can be true, and is not: the blocks seem to lie elsewhere."""
    if start or stop is None or len(data) > 1000:
        return data
    return data[:16] + bytes([data[16] + 5]) + data[17:]


def bad_end(_: int, __: int | None, data: bytes) -> bytes:
    return data[:-9] + bytes(9)


@pytest.mark.parametrize("spoil", [bad_magic, bad_offsets, bad_end])
@pytest.mark.parametrize("shards", [None, (64, 64, 128)])
def test_what_is_spoilt_on_its_way_once_is_asked_for_again(
    tmp_path: Path, spoil: Callable[[int, int | None, bytes], bytes], shards: tuple[int, int, int] | None
) -> None:
    """Chunks of 2 MiB in several blocks, so that rows are fetched by what their heads say."""
    values = np.random.default_rng(0).standard_normal((64, 64, 128)).astype("f4")
    url = write_v1(tmp_path / "s.mdio", values, chunks=(64, 64, 128), shards=shards, compressors=BloscCodec())
    survey = open_survey(url)
    survey = replace(survey, objects=Spoiling(survey.objects, spoil))
    reader = WindowReader(survey, None, keep=False)
    for rows in (slice(40, 64), slice(0, 10), slice(0, 64)):
        got = reader.read((rows.start, 0, 0), (rows.stop - rows.start, 64, 128))
        np.testing.assert_array_equal(got, values[rows])
    if spoil is not bad_offsets or shards is None:
        assert reader.transfers.meter.now().retries >= 1
    reader.close()


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("keep", [True, False])
def test_without_threads_to_be_had_it_goes_on_or_says_so(tmp_path: Path, threads: int, keep: bool) -> None:
    values = np.random.default_rng(0).standard_normal((12, 15, 18)).astype("f4")
    survey = open_survey(write_v1(tmp_path / "s.mdio", values))
    reader = WindowReader(survey, None, Transfers(most=8, decoders=2), keep=keep)
    with few_threads(threads, "fetch", "decode"):
        try:
            np.testing.assert_array_equal(reader.read((0, 0, 0), values.shape), values)
        except SurveyError as error:
            assert "thread" in str(error)  # noqa: PT017 - with so few it may go either way
        else:
            assert threads
    np.testing.assert_array_equal(reader.read((0, 0, 0), values.shape), values)
    reader.close()


def test_closing_meanwhile_hangs_nobody(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((12, 15, 18)).astype("f4")
    survey = open_survey(write_v1(tmp_path / "s.mdio", values))
    for keep in (True, False):
        transfers = Transfers(most=2)
        reader = WindowReader(survey, None, transfers, keep=keep)
        with ThreadPoolExecutor(4) as threads:
            futures = [threads.submit(reader.read, (0, 0, 0), values.shape) for _ in range(30)]
            futures[0].result(30)
            transfers.close()
            for future in futures:
                error = future.exception(30)
                assert error is None or "this reader was closed; make another one" in str(error), error


@pytest.mark.filterwarnings("ignore:Numcodecs codecs")
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_zfp(tmp_path: Path, zarr_format: int) -> None:
    values = np.random.default_rng(0).standard_normal((12, 15, 18)).astype("f4")
    if zarr_format == 3:
        from zarr.codecs.numcodecs import ZFPY

        options = {"serializer": ZFPY(mode=4, tolerance=0.01), "compressors": None}
    else:
        options = {"compressors": numcodecs.ZFPY(mode=4, tolerance=0.01)}
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, zarr_format=zarr_format, **options))
    reader = WindowReader(survey, STATISTICS)
    got = reader.read((1, 2, 3), (9, 11, 13))
    np.testing.assert_array_equal(got, plain(survey, STATISTICS, (1, 2, 3), (9, 11, 13)))
    assert not np.array_equal(got, (np.clip(values, -1.5, 2)[1:10, 2:13, 3:16] - 0.25) / 0.75)  # it is lossy
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
    first = reader.transfers.meter.now()
    assert (first.cache_hits, first.cache_misses, first.bytes_decoded) == (0, 8, 8 * 4 * 5 * 6 * 4)
    reader.read((1, 1, 1), (5, 6, 7))
    again = reader.transfers.meter.now().minus(first)
    assert (again.cache_hits, again.cache_misses, again.requests) == (8, 0, 0)


def test_cache_keeps_the_recently_used_within_its_budget(survey: Survey) -> None:
    chunk = 4 * 5 * 6 * 4
    reader = WindowReader(survey, STATISTICS, cache_bytes=2 * chunk, keep=True)
    for place in (0, 6, 0, 12, 0, 6):  # 6 was used before 12 came, 0 after: 6 had to go
        reader.read((0, 0, place), (4, 5, 6))
    seen = reader.transfers.meter.now()
    assert (seen.cache_hits, seen.cache_misses) == (2, 4)
    assert reader.cache is not None
    assert reader.cache.bytes <= 2 * chunk


def test_a_small_cache_keeps_nothing_of_a_large_survey(survey: Survey) -> None:
    assert WindowReader(survey, STATISTICS, cache_bytes=12 * 15 * 18 * 4 // 4).cache is None
    assert WindowReader(survey, STATISTICS, cache_bytes=2 * 12 * 15 * 18 * 4).cache is not None


@pytest.mark.parametrize("keep", [True, False])
def test_threads_share_a_reader(survey: Survey, keep: bool) -> None:
    reader = WindowReader(survey, STATISTICS, Transfers(memory=2000, decoders=3, most=5), cache_bytes=3000, keep=keep)
    rng = np.random.default_rng(1)
    origins = [tuple(int(v) for v in rng.integers(0, (7, 9, 11))) for _ in range(200)]
    with ThreadPoolExecutor(8) as threads:
        for origin, got in zip(origins, threads.map(lambda o: reader.read(o, (5, 6, 7)), origins), strict=True):
            np.testing.assert_array_equal(got, plain(survey, STATISTICS, origin, (5, 6, 7)))


def test_rows_alone_are_fetched_where_that_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SMALLEST_SAVING", 1)
    values = np.random.default_rng(0).standard_normal((64, 16, 128)).astype("f4")
    for name, compressors, most in (
        ("raw", None, 0.26),
        ("blosc", BloscCodec(cname="zstd", shuffle="shuffle", blocksize=2 * 16 * 128 * 4), 0.32),
    ):
        url = write_v1(tmp_path / name, values, chunks=values.shape, compressors=compressors)
        survey = open_survey(url)
        reader = WindowReader(survey, None, keep=False)
        got = reader.read((17, 3, 5), (16, 10, 99))
        np.testing.assert_array_equal(got, values[17:33, 3:13, 5:104])
        stored = (Path(url) / "amplitude/c/0/0/0").stat().st_size
        assert reader.transfers.meter.now().bytes_fetched < most * stored, name
        reader.close()


def test_context_ranks_fetch_their_own_slabs_alone(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((64, 32, 32)).astype("f4")
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, chunks=(8, 16, 16)))
    stored = sum(path.stat().st_size for path in (tmp_path / "s.mdio/amplitude/c").rglob("*") if path.is_file())
    for ranks in (1, 2, 4, 8):
        slabs = []
        for rank in range(ranks):
            reader = WindowReader(survey, STATISTICS, keep=False)
            slabs.append(reader.read((rank * 64 // ranks, 0, 0), (64 // ranks, 32, 32)))
            assert reader.transfers.meter.now().bytes_fetched <= 1.02 * stored / ranks
            reader.close()
        np.testing.assert_array_equal(np.concatenate(slabs), plain(survey, STATISTICS, (0, 0, 0), (64, 32, 32)))


def test_slabs_that_cut_chunks_fetch_little_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SMALLEST_SAVING", 1)
    values = np.random.default_rng(0).standard_normal((96, 32, 256)).astype("f4")
    codec = BloscCodec(cname="zstd", shuffle="shuffle", blocksize=32 * 128 * 4)
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, chunks=(64, 32, 128), compressors=codec))
    stored = sum(path.stat().st_size for path in (tmp_path / "s.mdio/amplitude/c").rglob("*") if path.is_file())
    for rank in range(4):  # 24 rows each; chunks hold 64
        reader = WindowReader(survey, None, keep=False)
        np.testing.assert_array_equal(reader.read((24 * rank, 0, 0), (24, 32, 256)), values[24 * rank : 24 * rank + 24])
        heads = 2 * 2 * survey.layout.codec.head  # at most two chunks along inline, two along the traces
        assert reader.transfers.meter.now().bytes_fetched - heads <= 1.02 * stored / 4
        reader.close()


def test_writes_into_given_room_and_other_number_formats(survey: Survey) -> None:
    import torch

    exact = plain(survey, STATISTICS, (0, 1, 2), (6, 7, 8))
    batch = np.zeros((2, 6, 7, 8), np.float16)
    reader = WindowReader(survey, STATISTICS, kind="float16")
    assert reader.read((0, 1, 2), (6, 7, 8), out=batch[1]).base is batch
    np.testing.assert_array_equal(batch[1], exact.astype(np.float16))
    assert not batch[0].any()
    bits = WindowReader(survey, STATISTICS, kind="bfloat16").read((0, 1, 2), (6, 7, 8))
    got = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(got.nan_to_num(9), torch.from_numpy(exact).bfloat16().nan_to_num(9))
    padded = WindowReader(survey, STATISTICS, kind="bfloat16", pad=True).read((0, 0, 0), (13, 1, 1))
    assert torch.from_numpy(padded.view(np.int16)).view(torch.bfloat16)[12].isnan().all()


def test_absent_chunks_are_no_data(survey: Survey) -> None:
    for chunk in (Path(survey.url) / "amplitude" / "c").rglob("*"):
        if chunk.is_file():
            chunk.unlink()
    reader = WindowReader(survey, STATISTICS)
    assert np.isnan(reader.read((1, 0, 0), (5, 6, 7))).all()
    assert reader.transfers.meter.now().absent_chunks == 8


def test_one_absent_chunk_leaves_the_others(survey: Survey) -> None:
    (Path(survey.url) / "amplitude/c/1/1/1").unlink()
    for keep in (True, False):
        got = WindowReader(survey, STATISTICS, keep=keep).read((4, 0, 0), (8, 15, 18))
        np.testing.assert_array_equal(got, plain(survey, STATISTICS, (4, 0, 0), (8, 15, 18)))
        assert np.isnan(got[:4, 5:10, 6:12]).all()
        assert np.isfinite(got[4:]).all()


def test_a_survey_that_vanishes_is_no_fill(survey: Survey) -> None:
    reader = WindowReader(survey, STATISTICS, Transfers(backoff=HASTY))
    os.rename(survey.url, f"{survey.url}.gone")
    with pytest.raises(SurveyError, match=r"s\.mdio: the survey is no longer there"):
        reader.read((1, 0, 0), (5, 6, 7))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("compressors", [None, BloscCodec(), ZstdCodec(), [GzipCodec(), Crc32cCodec()]])
def test_damaged_chunk_is_named_and_may_heal(tmp_path: Path, keep: bool, compressors: BloscCodec | None) -> None:
    values = np.random.default_rng(0).standard_normal((12, 15, 18)).astype("f4")
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, compressors=compressors))
    path = Path(survey.url) / "amplitude" / "c" / "1" / "2" / "0"
    whole = path.read_bytes()
    reader = WindowReader(survey, STATISTICS, keep=keep)
    damages = [whole[: len(whole) // 2], b"", whole[:7]]
    if compressors is not None:  # without a codec any bytes are amplitudes
        damages.append(b"x" * len(whole))
    for damaged in damages:
        path.write_bytes(damaged)
        with pytest.raises(SurveyError, match=r"s\.mdio: chunk \(1, 2, 0\) cannot be read: .*ingest the survey again"):
            reader.read((2, 3, 0), (4, 9, 6))
    path.write_bytes(whole)
    np.testing.assert_array_equal(reader.read((2, 3, 0), (4, 9, 6)), plain(survey, STATISTICS, (2, 3, 0), (4, 9, 6)))


def test_a_flipped_byte_is_found_where_a_checksum_is(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((4, 5, 6)).astype("f4")
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, compressors=[BloscCodec(), Crc32cCodec()]))
    path = Path(survey.url) / "amplitude/c/0/0/0"
    whole = path.read_bytes()
    for place in range(0, len(whole), 17):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(SurveyError, match=r"chunk \(0, 0, 0\) cannot be read: its CRC32C checksum differs"):
            WindowReader(survey).read((0, 0, 0), (4, 5, 6))


def test_a_flipped_byte_in_blosc_never_crashes(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((8, 16, 32)).astype("f4")
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, chunks=(8, 16, 32), compressors=BloscCodec()))
    path = Path(survey.url) / "amplitude/c/0/0/0"
    whole = path.read_bytes()
    reader = WindowReader(survey, keep=False)
    for place in range(16):  # the header, which the C library trusts
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        try:
            reader.read((0, 0, 0), (8, 16, 32))
        except SurveyError as error:
            assert "chunk (0, 0, 0) cannot be read" in str(error)  # noqa: PT017 - some flips change nothing that matters


def test_window_that_leaves_the_survey(survey: Survey) -> None:
    with pytest.raises(
        SurveyError, match=r"a window of 6 from 10 along crossline leaves the survey, which has 15 there"
    ):
        WindowReader(survey, STATISTICS).read((0, 10, 0), (4, 6, 4))


def test_a_forked_child_says_so(survey: Survey) -> None:
    reader = WindowReader(survey, STATISTICS)
    reader.read((0, 0, 0), (4, 5, 6))
    words = said_by_a_child(lambda: reader.read((0, 0, 0), (4, 5, 6)))
    assert "this reader was made before this process was forked" in words


@pytest.mark.parametrize("name", ["reef3d_v0.mdio.tar.gz", "cube75x71_v1_zarr2.mdio.tar.gz"])
def test_real_surveys(unpacked: Callable[[str], Path], name: str) -> None:
    survey = open_survey(str(unpacked(name)))
    statistics = estimate(survey)
    reader = WindowReader(survey, statistics)
    origin = (3, 5, 2)
    shape = (70, 60, 20)
    np.testing.assert_array_equal(reader.read(origin, shape), plain(survey, statistics, origin, shape))


def test_a_trace_of_zeros_has_no_data(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(6, 7, 40)).astype(np.float32)
    values[2, 3] = 0  # dead from top to bottom
    values[4, 5, :20] = 0  # muted above sample 20
    values[1, 1, 5] = 0  # a zero crossing
    survey = open_survey(write_v1(tmp_path / "zeros.mdio", values, np.ones((6, 7), bool), (4, 4, 20)))
    reader = WindowReader(survey, Statistics(-9, 9, 0, 1, 1))
    expected = values.copy()
    expected[2, 3] = np.nan
    np.testing.assert_array_equal(reader.read((0, 0, 0), values.shape), expected)
    expected[4, 5] = np.nan
    np.testing.assert_array_equal(reader.read((0, 0, 2), (6, 7, 17)), expected[:, :, 2:19])
    few = reader.read((0, 0, 2), (6, 7, DEAD_SAMPLES - 1))  # so few zeros may be an accident
    assert np.isfinite(few).all()


def test_a_constant_and_a_nan_block(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(12, 10, 18)).astype(np.float32)
    values[4:8, 5:, 6:12] = np.nan
    values[8:, :5] = 3.0
    survey = open_survey(write_v1(tmp_path / "s.mdio", values))
    got = WindowReader(survey, STATISTICS).read((0, 0, 0), values.shape)
    assert np.isnan(got[4:8, 5:, 6:12]).all()
    assert (got[8:, :5] == np.float32((2.0 - 0.25) / 0.75)).all()


def test_unknown_codec_is_refused_when_opening(tmp_path: Path) -> None:
    url = write_v1(tmp_path / "s.mdio", np.ones((4, 5, 6), "f4"), compressors=ZstdCodec())
    path = Path(url) / "amplitude/zarr.json"
    path.write_text(path.read_text().replace('"zstd"', '"acme.rle"'))
    with pytest.raises(SurveyError, match=r"acme\.rle"):
        open_survey(url)


def test_zarr_agrees_on_what_is_stored(tmp_path: Path) -> None:
    """The oracle above reads through Zarr; the values that were written agree, too."""
    values = np.random.default_rng(0).standard_normal((9, 10, 11)).astype("f4")
    url = write_v1(tmp_path / "s.mdio", values)
    np.testing.assert_array_equal(WindowReader(open_survey(url)).read((0, 0, 0), values.shape), values)
    np.testing.assert_array_equal(zarr.open_array(url, path="amplitude")[...], values)


@pytest.mark.parametrize("dtype", ["<f4", "|i1", ">i2", "<f8"])
@pytest.mark.parametrize("blocksize", [0, 40_000])
def test_rows_of_blosc_chunks_whose_last_block_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, blocksize: int
) -> None:
    monkeypatch.setattr(layout, "SMALLEST_SAVING", 1)
    values = (np.random.default_rng(0).standard_normal((130, 50, 61)) * 9).astype(dtype)
    codec = BloscCodec(cname="zstd", shuffle="shuffle", blocksize=blocksize)
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, chunks=(70, 50, 61), compressors=codec))
    reader = WindowReader(survey, None, keep=False)
    for first, rows in [(69, 1), (68, 2), (60, 30), (0, 3), (129, 1), (70, 60), (69, 61)]:
        np.testing.assert_array_equal(
            reader.read((first, 0, 0), (rows, 50, 61)), values[first : first + rows].astype("f4")
        )
    reader.close()


def test_blocks_that_threads_wrote_in_another_order() -> None:
    decoded = np.random.default_rng(0).standard_normal(50_000).astype("f4")
    chunk = numcodecs.Blosc(cname="zstd", shuffle=1, blocksize=16_384).encode(decoded)
    frame = blosc.parse(chunk, decoded.nbytes)
    assert frame is not None
    assert frame.starts is not None
    ends = np.append(np.sort(frame.starts), frame.stored)
    pieces = [bytes(chunk[s : ends[np.searchsorted(ends, s, side="right")]]) for s in frame.starts]
    order = np.random.default_rng(1).permutation(len(pieces))
    starts, at, body = np.zeros(len(pieces), "<i4"), int(frame.starts.min()), b""
    for block in order:
        starts[block] = at + len(body)
        body += pieces[block]
    shuffled = bytes(chunk[:16]) + starts.tobytes() + body
    codec = ChunkCodec((50, 10, 100), np.dtype("<f4"), [_Blosc(numcodecs.Blosc())], None)
    for rows in (range(1), range(7, 30), range(49, 50), range(50)):
        found = codec.frame(shuffled[: codec.head])
        span = codec.span(rows, found)
        part = shuffled[span[0] : span[1]]
        for data in (part, memoryview(bytearray(part))):  # without and with room for a header before the blocks
            got = codec.decode(Payload(data, span[0], found), rows, np.empty(codec.bytes, np.uint8))
            np.testing.assert_array_equal(got, decoded.reshape(50, 10, 100)[rows.start : rows.stop])


@pytest.mark.parametrize("writable", [False, True])
def test_the_header_that_comes_with_a_part_is_not_believed(writable: bool) -> None:
    """The C library would read beyond the end of what is there."""
    decoded = np.random.default_rng(0).standard_normal(50_000).astype("f4")
    chunk = bytes(numcodecs.Blosc(cname="zstd", shuffle=1, blocksize=65_536).encode(decoded))
    codec = ChunkCodec((50, 10, 100), np.dtype("<f4"), [_Blosc(numcodecs.Blosc())], None)
    frame, rows = codec.frame(chunk), range(1, 50)  # of which every block holds some
    assert frame is not None
    assert codec.span(rows, frame) == (0, len(chunk))
    part = bytearray(chunk)
    part[12:20] = b"\xff" * 8  # stored bytes, and where the first block begins
    data = memoryview(part) if writable else bytes(part)
    got = codec.decode(Payload(data, 0, frame), rows, np.empty(codec.bytes, np.uint8))
    np.testing.assert_array_equal(got, decoded.reshape(50, 10, 100)[1:])


def test_chunks_that_share_their_bytes_in_a_shard(tmp_path: Path) -> None:
    """A header put before the blocks of one must not be read as blocks of the other."""
    noise = np.random.default_rng(0).standard_normal((32, 64, 64)).astype("f4")
    chunk = np.concatenate([noise, np.broadcast_to(1 + np.arange(64, dtype="f4"), (32, 64, 64))])
    values = np.concatenate([chunk, chunk])
    codec = BloscCodec(cname="lz4", clevel=5, shuffle="noshuffle", blocksize=16384)
    url = write_v1(tmp_path / "s.mdio", values, chunks=(64, 64, 64), shards=(128, 64, 64), compressors=codec)
    shard = Path(url) / "amplitude/c/0/0/0"
    stored = shard.read_bytes()
    index = np.frombuffer(stored[-36:-4], "<u8").reshape(2, 2).copy()
    index[1] = index[0]
    checksum = struct.pack("<I", google_crc32c.value(index.tobytes()))
    shard.write_bytes(stored[: int(index[0].sum())] + index.tobytes() + checksum)
    reader = WindowReader(open_survey(url), keep=False)
    for first in (5, 10, 20, 30):
        np.testing.assert_array_equal(reader.read((first, 0, 0), (64, 64, 64)), values[first : first + 64])
    assert not reader.transfers.meter.now().retries
    reader.close()


@pytest.mark.parametrize("compressors", [ZstdCodec(), BloscCodec(), GzipCodec()])
@pytest.mark.parametrize("filters", [None, TransposeCodec(order=(2, 1, 0))])
def test_a_chunk_that_decodes_to_fewer_bytes_shows_nothing_of_another(
    tmp_path: Path, compressors: ZstdCodec, filters: TransposeCodec | None
) -> None:
    values = np.random.default_rng(0).standard_normal((8, 5, 6)).astype("f4")
    options = {"compressors": compressors} | ({"filters": filters} if filters else {})
    survey = open_survey(write_v1(tmp_path / "s.mdio", values, **options))
    half = write_v1(tmp_path / "half.mdio", values[:2], chunks=(2, 5, 6), **options)
    (Path(survey.url) / "amplitude/c/1/0/0").write_bytes((Path(half) / "amplitude/c/0/0/0").read_bytes())
    reader = WindowReader(survey, None, Transfers(decoders=1), keep=False)
    reader.read((0, 0, 0), (4, 5, 6))
    with pytest.raises(SurveyError, match=r"chunk \(1, 0, 0\) cannot be read"):
        reader.read((4, 0, 0), (4, 5, 6))


def test_a_slab_wholly_in_the_padding_holds_no_data(survey: Survey) -> None:
    whole = WindowReader(survey, STATISTICS, pad=True).read((0, 0, 0), (32, 15, 18))
    for first in (0, 8, 16, 24):
        slab = WindowReader(survey, STATISTICS, pad=True).read((first, 0, 0), (8, 15, 18))
        np.testing.assert_array_equal(slab, whole[first : first + 8])


def test_out_must_fit(survey: Survey) -> None:
    with pytest.raises(ValueError, match=r"out is \(9, 9, 9\) of float32, not \(4, 5, 6\)"):
        WindowReader(survey).read((0, 0, 0), (4, 5, 6), out=np.empty((9, 9, 9), np.float32))


def test_a_closed_reader_says_so(survey: Survey) -> None:
    reader = WindowReader(survey)
    reader.close()
    with pytest.raises(SurveyError, match="this reader was closed"):
        reader.read((0, 0, 0), (4, 5, 6))
