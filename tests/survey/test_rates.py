"""How many requests in flight saturate, what limits there, and the command that measures it."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.image import imread

from benchmarks.bucket import Bucket
from sfm.survey import cli
from sfm.survey.clients import SurveyError
from sfm.survey.devstore import DevStore
from sfm.survey.mdio import open_survey
from sfm.survey.rates import Bench, Point, enough, plot_png, saturating, still_rising, table, verdict
from sfm.survey.reader import WindowReader
from sfm.survey.transfers import Transfers
from tests.survey.conftest import write_v1


def point(in_flight: int, rate: float, **fields: float) -> Point:
    """So many MB/s for one second, decoded to as many at 1 GB/s, on two CPUs."""
    size = int(rate * 1e6)
    plain = {
        "seconds": 1.0, "requests": 10, "retries": 0, "bytes_fetched": size, "bytes_decoded": size, "windows": 5,
        "fetch_seconds": 1.0, "decode_seconds": size / 1e9, "cpu_seconds": 0.4, "cpus": 2, "others_share": 0.0,
        "p50": 0.1, "p95": 0.2,
    }  # fmt: skip
    return Point(in_flight, **{**plain, **fields})  # type: ignore[arg-type]


def points(*rates: float) -> list[Point]:
    return [point(2**n, rate) for n, rate in enumerate(rates)]


@pytest.mark.parametrize(
    ("rates", "in_flight", "rising", "stop"),
    [
        ((100,), 1, True, False),
        ((100, 200), 2, True, False),
        ((100, 200, 400), 4, True, False),
        ((100, 200, 203), 2, False, False),  # one flat step may be chance
        ((100, 200, 203, 190), 2, False, True),
        ((100, 200, 203, 400), 8, True, False),
        ((100, 90, 95), 1, False, True),
        ((100, 196, 204), 2, False, False),
        ((100, 200, 240, 238, 240), 4, False, True),
    ],
)
def test_the_fewest_requests_that_bring_what_the_store_gives(
    rates: tuple, in_flight: int, rising: bool, stop: bool
) -> None:
    measured = points(*rates)
    assert saturating(measured).in_flight == in_flight
    assert still_rising(measured) == rising
    assert enough(measured) == stop


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "the store, or the way to it, limits: 20% of 2 CPUs in use here"),
        (
            {"cpu_seconds": 1.9, "decode_seconds": 1.5},
            "decoding limits: it takes 79% of the CPU time, 95% of 2 CPUs",
        ),
        ({"cpu_seconds": 1.9}, "this machine's CPUs limit (95% of 2 CPUs in use here): decoding takes 21% of that"),
        (
            {"others_share": 0.75},
            "this machine's CPUs limit: 20% of 2 CPUs in use here, and other processes, such as a server on this "
            "machine, use 75%",
        ),
    ],
)
def test_what_limits(fields: dict, sentence: str) -> None:
    slow = {"decode_seconds": fields["decode_seconds"]} if "decode_seconds" in fields else {}
    said = verdict([point(1, 200, **slow), point(2, 400, **fields), point(4, 401, **slow)])
    assert saturating([point(1, 400), point(2, 400, bytes_decoded=8e8)]).in_flight == 2  # what comes through counts
    assert said[0] == "2 in flight saturate: 400 MB/s decoded, 400 MB/s from the store; more bring no more"
    assert said[1].startswith(sentence)


def test_not_saturated_and_nothing_decoded() -> None:
    said = verdict([point(1, 20), point(2, 40, decode_seconds=0.02)])
    assert said[0] == (
        "2 in flight are not enough: more still bring more (40 MB/s decoded, 40 MB/s from the store); try --most"
    )
    assert said[-1] == "one core decodes 2 GB/s of what this survey holds, scaling included"
    nothing = point(1, 1, bytes_decoded=0, decode_seconds=0.0, windows=0, p50=math.nan)
    assert len(verdict([nothing])) == 1
    assert nothing.to_json()["p50"] is None
    assert len(table([nothing])) == 2
    assert imread_size(plot_png([nothing], "x")) > (400, 700)


def imread_size(data: bytes) -> tuple[int, int]:
    import io

    height, width, _ = imread(io.BytesIO(data)).shape
    return height, width


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "lab").mkdir()
    mask = np.ones((40, 48), bool)
    mask[:8] = False
    write_v1(folder / "lab/s.mdio", np.random.default_rng(0).random((40, 48, 56), "f4"), mask, chunks=(8, 8, 8))
    return folder


@pytest.fixture(scope="module")
def store(root: Path) -> Iterator[None]:
    with DevStore(root) as served, pytest.MonkeyPatch.context() as patch:
        for name, value in served.environment.items():
            patch.setenv(name, value)
        yield


@pytest.mark.usefixtures("store")
def test_the_command(tmp_path: Path) -> None:
    arguments = ["bench", "s3://lab/s.mdio", "--most", "3", "--seconds", "0.3", "-o", str(tmp_path / "b.png")]
    result = CliRunner().invoke(cli.survey, [*arguments, "--window", "16,128,16"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "s3://lab/s.mdio, windows of 16 x 48 x 16"
    assert [line.split()[0] for line in lines[2:4]] == ["1", "2"]
    assert "one core decodes" in lines[-1]
    height, width, _ = imread(tmp_path / "b.png").shape
    assert (height, width) == (528, 880)


@pytest.mark.usefixtures("store")
def test_the_command_as_json() -> None:
    arguments = ["bench", "s3://lab/s.mdio", "--most", "1", "--seconds", "0.3", "--json"]
    found = json.loads(CliRunner().invoke(cli.survey, arguments, catch_exceptions=False).output)
    (one,) = found["points"]
    assert found["window"] == [40, 48, 56]
    assert found["saturating"] == one["in_flight"] == 1
    assert one["rate"] == pytest.approx(one["bytes_fetched"] / one["seconds"])
    assert 0 < one["cpu_share"] <= 1.1
    assert one["windows"] > 0
    assert one["p50"] <= one["p95"]


def test_as_many_are_in_flight_as_asked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    with Bucket(root, latency=0.1) as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        bench = Bench(open_survey("s3://lab/s.mdio"), (4, 4, 4))
        for in_flight in (1, 2, 24):
            bucket.reset()
            got = bench.measure(in_flight, 0.5)
            assert 0.9 * in_flight <= bucket.stats()["peak"] <= in_flight
            assert got.in_flight == in_flight
            # No more requests in a second than fit into it one after the other, times those side by side.
            assert 0 < got.requests / got.seconds < 1.2 * in_flight / 0.1
            assert got.fetch_seconds / got.seconds < 1.2 * in_flight
    assert threading.active_count() == before


def test_memory_bounds_how_many(root: Path) -> None:
    survey = open_survey(str(root / "lab/s.mdio"))
    assert Bench(survey, (8, 8, 8)).levels(64) == [1, 2, 4, 8, 16, 32, 64]
    assert Bench(survey, (8, 8, 8)).levels(7) == [1, 2, 4]
    assert Bench(survey, (8, 8, 8), memory=10 * 8**3 * 4).levels(64) == [1, 2, 4]
    assert Bench(survey, (8, 8, 8), memory=1).levels(64) == [1]


def test_windows_lie_inside_and_around_live_traces(root: Path) -> None:
    survey = open_survey(str(root / "lab/s.mdio"))
    bench = Bench(survey, (6, 6, 6))
    reader, rng = WindowReader(survey, transfers=Transfers(most=2)), np.random.default_rng(0)
    for _ in range(50):
        window = reader.read(bench._origin(rng), bench.window)
        assert not np.isnan(window).all()
    reader.transfers.close()


def test_nothing_to_read(tmp_path: Path) -> None:
    dead = write_v1(tmp_path / "s.mdio", np.ones((4, 4, 4), "f4"), np.zeros((4, 4), bool))
    with pytest.raises(SurveyError, match=r"s.mdio: no trace is live; there is nothing to read"):
        Bench(open_survey(dead), (4, 4, 4))


def test_a_store_that_loses_chunks_ends_the_measurement(tmp_path: Path) -> None:
    url = write_v1(tmp_path / "s.mdio", np.random.default_rng(0).random((4, 4, 4), "f4"), chunks=(4, 4, 4))
    bench = Bench(open_survey(url), (4, 4, 4))
    (tmp_path / "s.mdio/amplitude/c/0/0/0").write_bytes(b"x")
    with pytest.raises(SurveyError, match=r"chunk \(0, 0, 0\) cannot be read"):
        bench.sweep(4, 0.2)
