"""The disk cache keeps within its budget, survives whatever happens to its files, and mixes up no surveys."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sfm.survey.cache import ChunkCache, DiskCache
from sfm.survey.clients import SurveyError
from sfm.survey.mdio import open_survey
from sfm.survey.reader import WindowReader
from sfm.survey.transfers import Transfers
from tests.survey.conftest import write_v1


def test_keeps_what_was_used_last_within_its_budget(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "disk", 1000)
    for n in range(30):
        cache.put("s", f"k{n}", bytes(100))
        assert cache.get("s", "k0") is not None  # used again and again
        for age, path in enumerate(
            sorted((tmp_path / "disk/sfm-chunks").iterdir(), key=lambda p: p.stat().st_mtime_ns)
        ):
            os.utime(path, ns=(age, age))  # clocks are coarser than this loop
    assert sum(path.stat().st_size for path in (tmp_path / "disk/sfm-chunks").iterdir()) <= 1000
    assert cache.get("s", "k29") is not None
    assert cache.get("s", "k5") is None


def test_two_surveys_and_two_processes(tmp_path: Path) -> None:
    one, two = DiskCache(tmp_path, 10**6), DiskCache(tmp_path, 10**6)
    one.put("s", "k", b"1")
    two.put("t", "k", b"2")
    assert (two.get("s", "k"), one.get("t", "k"), one.get("u", "k")) == (b"1", b"2", None)


def test_a_broken_disk_stops_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "disk", 10**6)
    cache.put("s", "k", b"1")
    shutil.rmtree(tmp_path / "disk")
    assert cache.get("s", "k") is None
    cache.put("s", "k", b"1")
    assert cache.get("s", "k") is None


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "disk/lost+found").mkdir(parents=True)
    thesis = tmp_path / "disk/thesis.txt"
    thesis.write_text("mine" * 1000)
    os.utime(thesis, (0, 0))
    cache = DiskCache(tmp_path / "disk", 1000)
    for n in range(30):
        cache.put("s", f"k{n}", bytes(100))
    assert thesis.exists()
    assert cache.get("s", "k29") is not None


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SurveyError, match=r"resources\.disk_cache .*file/disk: cannot be used"):
        DiskCache(tmp_path / "file" / "disk", 10)


def test_second_reader_asks_the_store_for_nothing(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((12, 15, 18)).astype("f4")
    url = write_v1(tmp_path / "s.mdio", values)
    for round_ in range(2):
        transfers = Transfers(disk=DiskCache(tmp_path / "disk", 10**6))
        reader = WindowReader(open_survey(url), None, transfers, keep=False)
        np.testing.assert_array_equal(reader.read((1, 2, 3), (9, 9, 9)), values[1:10, 2:11, 3:12])
        seen = transfers.meter.now()
        assert (seen.requests, seen.disk_hits) == ((18, 0) if round_ == 0 else (0, 18))
        transfers.close()


def test_many_processes_share_one_budget(tmp_path: Path) -> None:
    caches = [DiskCache(tmp_path, 10**6) for _ in range(8)]  # as of eight readers of a node, each for itself
    most = 0
    for n in range(100):
        for number, cache in enumerate(caches):
            cache.put("survey", f"{number} {n}", bytes(5_000))
        most = max(most, sum(path.stat().st_size for path in (tmp_path / "sfm-chunks").iterdir()))
    assert 0.8e6 <= most <= 1.1e6


@pytest.mark.parametrize("shards", [None, (4, 5, 6)])
def test_what_is_damaged_on_the_disk_is_fetched_again(tmp_path: Path, shards: tuple[int, int, int] | None) -> None:
    values = np.random.default_rng(0).standard_normal((4, 5, 6)).astype("f4")
    url = write_v1(tmp_path / "s.mdio", values, shards=shards)
    for damage in (False, True, False):
        survey = open_survey(url)
        if damage:
            for path in (tmp_path / "disk/sfm-chunks").iterdir():
                path.write_bytes(path.read_bytes()[:20])
        transfers = Transfers(disk=DiskCache(tmp_path / "disk", 10**6))
        np.testing.assert_array_equal(WindowReader(survey, None, transfers).read((0, 0, 0), (4, 5, 6)), values)
        transfers.close()
    seen = transfers.meter.now()
    assert (seen.disk_hits, seen.retries, seen.requests) == (1 if shards is None else 2, 0, 0)  # mended


def test_a_survey_written_anew_is_not_read_from_the_disk(tmp_path: Path) -> None:
    disk = DiskCache(tmp_path / "disk", 10**6)
    for seed in range(2):
        values = np.random.default_rng(seed).standard_normal((12, 15, 18)).astype("f4")
        url = write_v1(tmp_path / "s.mdio", values, attributes={"createdOn": str(seed)})
        transfers = Transfers(disk=disk)
        got = WindowReader(open_survey(url), None, transfers).read((0, 0, 0), values.shape)
        np.testing.assert_array_equal(got, values)
        transfers.close()


def test_one_fetches_for_all_who_ask(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((12, 15, 18)).astype("f4")
    survey = open_survey(write_v1(tmp_path / "s.mdio", values))
    reader = WindowReader(survey, None, keep=True)
    with ThreadPoolExecutor(8) as threads:
        for got in threads.map(lambda _: reader.read((0, 0, 0), (12, 15, 18)), range(16)):
            np.testing.assert_array_equal(got, values)
    seen = reader.transfers.meter.now()
    assert (seen.requests, seen.cache_misses, seen.cache_hits) == (27, 27, 15 * 27)
    reader.close()


def test_who_waits_for_a_chunk_that_fails_is_told() -> None:
    cache = ChunkCache(1000)
    assert cache.ask("k") is None
    waiting = cache.ask("k")
    cache.fail("k", SurveyError("gone"))
    with pytest.raises(SurveyError, match="gone"):
        waiting.result(1)  # type: ignore[union-attr]
    assert cache.ask("k") is None  # who asks next tries again
