"""Against a real S3-protocol server that is slow and faulty: no wrong byte, no more memory than the budget, and each
context rank fetches its own slab alone."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from zarr.codecs import BloscCodec

from benchmarks.bucket import Bucket
from sfm.spec import Storage
from sfm.survey.clients import SurveyError
from sfm.survey.mdio import open_survey
from sfm.survey.pacing import Backoff
from sfm.survey.reader import WindowReader
from sfm.survey.transfers import Transfers
from tests.survey.conftest import said_by_a_child, write_v1

VALUES = np.random.default_rng(0).standard_normal((64, 48, 40)).astype("f4")


@pytest.fixture(scope="module", params=[False, True], ids=["http", "https"])
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    root = tmp_path_factory.mktemp("bucket")
    write_v1(root / "surveys/s.mdio", VALUES, chunks=(8, 8, 8))
    write_v1(root / "surveys/shards.mdio", VALUES, chunks=(8, 8, 8), shards=(32, 24, 40))
    write_v1(root / "surveys/plain.mdio", VALUES, chunks=(32, 48, 200), compressors=None)
    with Bucket(root, tls=request.param) as running:
        yield running


@pytest.fixture(autouse=True)
def calm(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    bucket.set(latency=0, fail=0, cut=0, stall=0)
    bucket.reset()
    yield
    bucket.set(latency=0, fail=0, cut=0, stall=0)


def windows(count: int) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    rng = np.random.default_rng(3)
    shapes = [tuple(int(v) for v in rng.integers(1, (30, 30, 30))) for _ in range(count)]
    return [
        (tuple(int(rng.integers(0, n - w + 1)) for n, w in zip(VALUES.shape, shape, strict=True)), shape)  # type: ignore[misc]
        for shape in shapes
    ]


@pytest.mark.parametrize("name", ["s.mdio", "shards.mdio"])
@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_no_wrong_byte_from_a_faulty_store(bucket: Bucket, client: str, name: str) -> None:
    survey = open_survey(f"s3://surveys/{name}", Storage(client=client))
    transfers = Transfers(backoff=Backoff(first=0.01, attempts=15))
    reader = WindowReader(survey, None, transfers, keep=False)
    bucket.set(fail=0.15, cut=0.15, stall=0.01, stall_seconds=0.2, seed=4)
    with ThreadPoolExecutor(4) as threads:
        for (origin, shape), got in zip(windows(20), threads.map(lambda w: reader.read(*w), windows(20)), strict=True):
            region = tuple(slice(o, o + n) for o, n in zip(origin, shape, strict=True))
            np.testing.assert_array_equal(got, VALUES[region])
    faults = bucket.stats()["faults"]
    assert faults["fail"] > 0
    assert faults["cut"] > 0
    if client == "obstore":  # s3fs makes some of them again by itself
        assert transfers.meter.now().retries >= faults["fail"] + faults["cut"]
    transfers.close()


def test_a_store_that_stays_down_is_a_sentence(bucket: Bucket) -> None:
    survey = open_survey("s3://surveys/s.mdio")
    transfers = Transfers(backoff=Backoff(first=0.001, attempts=4))
    bucket.set(fail=1.0)
    with pytest.raises(SurveyError, match=r"chunk \(0, 0, 0\) of s3://surveys/s\.mdio: .*503"):
        WindowReader(survey, None, transfers).read((0, 0, 0), (8, 8, 8))
    transfers.close()


def test_checksums_of_the_store_are_compared_on_request(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hashlib.md5", lambda data, **_: hashlib.sha1(data))
    reader = WindowReader(
        open_survey("s3://surveys/s.mdio", Storage(verify=True)), None, Transfers(backoff=Backoff(attempts=1))
    )
    with pytest.raises(SurveyError, match="does not match the checksum that its store states"):
        reader.read((0, 0, 0), (8, 8, 8))
    monkeypatch.undo()
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    survey = open_survey("s3://surveys/s.mdio", Storage(verify=True))
    np.testing.assert_array_equal(WindowReader(survey).read((0, 0, 0), VALUES.shape), VALUES)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_context_rank_fetches_its_share(bucket: Bucket, ranks: int) -> None:
    survey = open_survey("s3://surveys/s.mdio")
    folder = bucket.root / "surveys/s.mdio/amplitude/c"
    sample = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    for rank in range(ranks):
        bucket.reset()
        reader = WindowReader(survey, None, keep=False)
        rows = 64 // ranks
        np.testing.assert_array_equal(
            reader.read((rank * rows, 0, 0), (rows, 48, 40)), VALUES[rank * rows : (rank + 1) * rows]
        )
        assert bucket.stats()["bytes"] <= 1.02 * sample / ranks
        reader.close()


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
@pytest.mark.parametrize("name", ["plain.mdio", "shards.mdio"])
def test_an_object_shorter_than_what_is_asked_of_it(bucket: Bucket, client: str, name: str) -> None:
    """The server answers 416."""
    storage = Storage(client=client)  # type: ignore[arg-type]
    path = bucket.root / "surveys" / name / ("amplitude/c/1/0/0")
    whole = path.read_bytes()
    try:
        for left in (len(whole) // 3, 0):
            path.write_bytes(whole[:left])
            reader = WindowReader(open_survey(f"s3://surveys/{name}", storage), keep=False)
            with pytest.raises(SurveyError, match=r"cannot be read: .*; ingest the survey again"):
                reader.read((40, 0, 0), (8, 24, 40))
            reader.close()
    finally:
        path.write_bytes(whole)


@pytest.mark.usefixtures("calm")
def test_a_child_forked_after_reading_says_so() -> None:
    WindowReader(open_survey("s3://surveys/s.mdio")).read((0, 0, 0), (8, 8, 8))
    words = said_by_a_child(lambda: open_survey("s3://surveys/s.mdio"))
    assert "an object store was asked before this process was forked" in words


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_a_child_forked_with_an_open_survey_says_so(client: str) -> None:
    """It shares the connections of its parent."""
    survey = open_survey("s3://surveys/s.mdio", Storage(client=client))  # type: ignore[arg-type]
    WindowReader(survey).read((0, 0, 0), (8, 8, 8))
    words = said_by_a_child(lambda: WindowReader(survey).read((8, 8, 8), (8, 8, 8)))
    assert "an object store was asked before this process was forked" in words


_MEASURE = """
import json, sys
from sfm.spec import Storage
from sfm.survey.mdio import open_survey
from sfm.survey.reader import WindowReader
from sfm.survey.transfers import Transfers

def peak():  # not ru_maxrss, which remembers the process that started this one
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

survey = open_survey("s3://large/s.mdio", Storage(client=sys.argv[1]))
reader = WindowReader(survey, None, Transfers(memory=int(sys.argv[2]), decoders=2), keep=False)
reader.read((0, 0, 0), (8, 8, 8))  # threads and connections
before = peak()
reader.read((0, 0, 0), survey.shape)
print(json.dumps(peak() - before))
"""


def test_memory_stays_within_the_budget_beside_the_window(bucket: Bucket, tmp_path: Path) -> None:
    shape, budget, chunk = (192, 192, 256), 12 * 2**20, 4 * 64**3
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    write_v1(bucket.root / "large/s.mdio", values, chunks=(64, 64, 64), compressors=BloscCodec())
    window = values.nbytes  # three times the budget
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, "obstore", str(budget)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    grown = json.loads(done.stdout)
    # The window, what is on its way, and in each decoding thread a decoded chunk and a tile that is scaled.
    assert window <= grown + 2**22
    assert grown <= window + budget + 2 * (chunk + 2**20) + 2**23
