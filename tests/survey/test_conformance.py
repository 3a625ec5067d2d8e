"""Windows equal what multidimio itself reads, and are the same whoever serves and fetches them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import mdio
import numpy as np
import pytest
import zarr

from benchmarks.bucket import Bucket
from sfm.spec import Storage
from sfm.survey import mdio as mdio_module
from sfm.survey import segy
from sfm.survey.clients import SurveyError
from sfm.survey.ingest import ingest
from sfm.survey.mdio import Survey, open_survey
from sfm.survey.pacing import Backoff
from sfm.survey.reader import WindowReader
from sfm.survey.synth import Recipe, synthesise
from tests.survey.conftest import real, write_v1
from tests.survey.test_ingest import in_threads, samples

__all__ = ["in_threads"]  # a fixture


def windows(survey: Survey, count: int = 8) -> list[tuple[tuple[slice, ...], np.ndarray]]:
    """Random windows as stored, and all of the survey: where, and what."""
    rng, found = np.random.default_rng(0), []
    reader = WindowReader(survey, keep=False)
    for number in range(count):
        shape = survey.shape if not number else tuple(int(rng.integers(1, n + 1)) for n in survey.shape)
        origin = tuple(int(rng.integers(n - w + 1)) for n, w in zip(survey.shape, shape, strict=True))
        region = tuple(slice(o, o + n) for o, n in zip(origin, shape, strict=True))
        found.append((region, reader.read(origin, shape)))  # type: ignore[arg-type]
    reader.close()
    return found


def assert_reads(survey: Survey, cube: np.ndarray, live: np.ndarray) -> None:
    """Windows are those of `cube`, NaN on dead traces: those outside of `live`, and those of zeros."""
    np.testing.assert_array_equal(survey.trace_mask, live)
    for region, window in windows(survey):
        expected = np.where(live[region[:2]][..., None], cube[region], np.nan).astype("f4")
        if expected.shape[2] >= 16:
            expected[~expected.any(axis=2)] = np.nan
        np.testing.assert_array_equal(window, expected)


@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("domain", ["time", "depth"])
def test_what_multidimio_writes_is_read_as_multidimio_reads_it(
    tmp_path: Path, zarr_format: Literal[2, 3], domain: Literal["time", "depth"]
) -> None:
    # multidimio 1.1 fails to write traces that are missing into Zarr v2.
    synthesise(tmp_path / "s.sgy", Recipe(size=(40, 36, 64), missing=zarr_format == 3, dead=3))
    with zarr.config.set({"default_zarr_format": zarr_format}):
        ingest(tmp_path / "s.sgy", str(tmp_path / "s.mdio"), chunks=(16, 16, 32), domain=domain)
        dataset = mdio.open_mdio(tmp_path / "s.mdio")
        cube, live = dataset["amplitude"].values, dataset["trace_mask"].values.astype(bool)
        coordinates = [dataset[name].values for name in dataset["amplitude"].dims]
    survey = open_survey(str(tmp_path / "s.mdio"))
    assert survey.array.metadata.zarr_format == zarr_format
    assert [axis.name for axis in survey.axes] == ["inline", "crossline", domain]
    for axis, values in zip(survey.axes, coordinates, strict=True):
        np.testing.assert_array_equal(axis.coordinates, values)
    assert live.all() == (zarr_format == 2)
    assert (cube[live] == 0).all(axis=-1).sum() == 3
    assert_reads(survey, cube, live)


def test_a_real_v1_survey(unpacked: Callable[[str], Path]) -> None:
    path = unpacked("cube75x71_v1_zarr2.mdio.tar.gz")
    with zarr.config.set({"default_zarr_format": 2}):
        dataset = mdio.open_mdio(path)
        cube, live = dataset["amplitude"].values, dataset["trace_mask"].values.astype(bool)
    assert_reads(open_survey(str(path)), cube, live)


def test_a_real_v0_survey_holds_the_samples_of_its_segy(unpacked: Callable[[str], Path]) -> None:
    # multidimio 1 does not read what multidimio 0 wrote.
    survey = open_survey(str(unpacked("reef3d_v0.mdio.tar.gz")))
    file = segy.inspect(real("reef3d.sgy"))
    index = [np.unique(file.header(byte), return_inverse=True)[1] for byte in (189, 193)]
    cube = np.zeros(survey.shape, "f4")
    cube[index[0], index[1]] = samples(file)
    assert_reads(survey, cube, np.ones(survey.shape[:2], bool))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """A survey in a bucket, and its windows as the file system gives them."""
    root = tmp_path_factory.mktemp("buckets")
    (root / "lab").mkdir()
    rng = np.random.default_rng(0)
    values, mask = rng.standard_normal((20, 24, 40)).astype("f4"), rng.random((20, 24)) < 0.9
    values[:8, :8] = np.nan  # chunks that are not stored
    url = write_v1(root / "lab/s.mdio", values, mask, chunks=(8, 8, 16))
    return root, [window for _, window in windows(open_survey(url))]


@pytest.fixture(scope="module", params=["plain", "tls"])
def bucket(request: pytest.FixtureRequest, served: tuple[Path, list]) -> Iterator[Bucket]:
    with Bucket(served[0], tls=request.param == "tls") as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_opening_outlasts_a_store_that_refuses_now_and_then(
    served: tuple[Path, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch, client: Literal["obstore", "s3fs"]
) -> None:
    storage = Storage(client=client)
    monkeypatch.setattr(mdio_module, "Backoff", lambda: Backoff(first=0.001, attempts=10))
    with Bucket(served[0], fail=0.2, cut=0.2) as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        for window in (None, (8, 8, 8)):
            survey = open_survey("s3://lab/s.mdio", storage, window)
            assert survey.shape == (20, 24, 40)
        assert min(bucket.stats()["faults"][kind] for kind in ("fail", "cut")) >= 3
        if client == "s3fs":  # whose own attempts, each behind longer pauses, would take minutes
            return
        bucket.set(fail=1.0, cut=0.0)
        monkeypatch.setattr(mdio_module, "Backoff", lambda: Backoff(first=0.001, attempts=2))
        with pytest.raises(SurveyError, match=r"s3://lab/s.mdio: .*503"):
            open_survey("s3://lab/s.mdio", storage)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("open")]


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_windows_over_s3(bucket: Bucket, served: tuple[Path, list[np.ndarray]], client: str) -> None:
    assert bucket.endpoint_url.startswith("https" if bucket.tls else "http:")
    survey = open_survey("s3://lab/s.mdio", Storage(client=client))  # type: ignore[arg-type]
    for (_, window), expected in zip(windows(survey), served[1], strict=True):
        np.testing.assert_array_equal(window, expected)


def test_windows_over_http(bucket: Bucket, served: tuple[Path, list[np.ndarray]]) -> None:
    survey = open_survey(f"{bucket.endpoint_url}/lab/s.mdio")
    for (_, window), expected in zip(windows(survey), served[1], strict=True):
        np.testing.assert_array_equal(window, expected)
