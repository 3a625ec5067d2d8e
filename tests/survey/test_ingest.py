"""SEG-Y becomes MDIO sample for sample, on disk and in an object store; what cannot is refused and leaves nothing."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sfm.spec import Storage
from sfm.survey import segy
from sfm.survey.clients import SurveyError
from sfm.survey.devstore import DevStore, DevStoreError
from sfm.survey.ingest import HeaderBytes, ingest
from sfm.survey.mdio import Survey, open_survey
from sfm.survey.reader import WindowReader
from sfm.survey.statistics import estimate
from sfm.survey.synth import Recipe, synthesise
from tests.survey.conftest import real


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """multidimio in threads of this process: each process it spawns takes seconds to import it."""

    class Threads(ThreadPoolExecutor):
        def __init__(self, max_workers: int | None = None, mp_context: Any = None) -> None:
            assert mp_context.get_start_method() == "spawn"
            super().__init__(max_workers)

    for module in ("mdio.segy.parsers", "mdio.segy.blocked_io"):
        monkeypatch.setattr(f"{module}.ProcessPoolExecutor", Threads)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStore]:
    root = tmp_path_factory.mktemp("s3")
    (root / "lab").mkdir()
    with DevStore(root) as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("segy") / "small.sgy"
    synthesise(path, Recipe(size=(40, 36, 64), missing=True, dead=2))
    return path


def samples(file: segy.SegyFile) -> np.ndarray:
    """Samples of all traces, float32, decoded here and not by a library: [traces, samples]."""
    rows = np.fromfile(file.path, np.uint8)[3600:].reshape(file.traces, file.trace_bytes)[:, 240:]
    kind = {1: ">u4", 3: ">i2", 5: ">f4"}[file.format_code]
    values = np.ascontiguousarray(rows).view(kind)
    if file.format_code != 1:
        return values.astype("f4")
    bits = values.astype(np.int64)
    sign, exponent, mantissa = 1 - 2 * (bits >> 31), (bits >> 24 & 0x7F) - 64, bits & 0xFFFFFF
    return (sign * mantissa / 2.0**24 * 16.0**exponent).astype("f4")


def assert_holds(survey: Survey, path: Path) -> None:
    file = segy.inspect(path)
    axes = [file.header(189), file.header(193)]
    index = [np.searchsorted(a.coordinates, v) for a, v in zip(survey.axes, axes, strict=False)]
    cube = np.asarray(survey.array[...])
    np.testing.assert_array_equal(cube[index[0], index[1]], samples(file))
    live = np.zeros(survey.shape[:2], bool)
    live[index[0], index[1]] = True
    np.testing.assert_array_equal(survey.trace_mask, live)
    assert np.isnan(cube[~live]).all()
    np.testing.assert_array_equal(
        survey.axes[2].coordinates, file.header(109, "i2")[0] + file.interval * np.arange(file.samples)
    )
    assert survey.axes[2].unit == "ms"


@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize("name", ["reef3d.sgy", "f3_crop.sgy", "f3_sparse.sgy", "cube75x71.sgy"])
def test_real_files(tmp_path: Path, name: str) -> None:
    path = real(name)
    done = ingest(path, str(tmp_path / "s.mdio"), chunks=(64, 64, 64))
    assert done.survey.chunks == (64, 64, 64)
    assert_holds(done.survey, path)


def test_in_processes_of_its_own(tmp_path: Path, small: Path) -> None:
    done = ingest(small, str(tmp_path / "s.mdio"))
    assert done.traces == done.survey.trace_mask.sum() < 40 * 36
    assert done.survey.version == "v1"
    assert_holds(done.survey, small)
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("in_threads")
def test_object_store(store: DevStore, small: Path) -> None:
    url = "s3://lab/deep/er/small.mdio"
    done = ingest(small, url, chunks=(16, 16, 32))
    assert_holds(done.survey, small)
    survey = open_survey(url, Storage(endpoint_url=store.endpoint_url, region="us-east-1"))
    reader = WindowReader(survey, estimate(survey))
    window = reader.read((3, 5, 7), (30, 20, 40))
    assert np.isnan(window).any()
    assert abs(np.nanmean(window)) < 0.5
    with pytest.raises(SurveyError, match=r"s3://lab/deep/er/small.mdio exists; --overwrite replaces it"):
        ingest(small, url)
    assert ingest(small, url, overwrite=True).survey.chunks == (128, 128, 128)


def test_object_store_says_what_is_wrong(store: DevStore, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SurveyError, match=r"no survey at s3://lab/none.mdio; check the name"):
        open_survey("s3://lab/none.mdio")
    (store.root / "lab" / "notes").mkdir(exist_ok=True)
    (store.root / "lab" / "notes" / "a.txt").write_text("x")
    with pytest.raises(SurveyError, match=r"s3://nobucket/x.mdio: there is no bucket 'nobucket'; make it first"):
        ingest(small, "s3://nobucket/x.mdio")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "0" * 64)
    refused = rf"{store.endpoint_url} refuses permission to read it \(.*\); check the keys"
    with pytest.raises(SurveyError, match=r"s3://lab/none.mdio: " + refused):
        open_survey("s3://lab/none.mdio")
    with pytest.raises(SurveyError, match=r"refuses permission to write it|there is no bucket"):
        ingest(small, "s3://lab/x.mdio")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(SurveyError, match=r"no credentials for http://127.0.0.1:\d+; set AWS_ACCESS_KEY_ID"):
        open_survey("s3://lab/none.mdio")


@pytest.mark.usefixtures("store")
def test_nobody_listens() -> None:
    with pytest.raises(
        SurveyError, match=r"s3://lab/x.mdio: cannot connect to http://127.0.0.1:1; check that the server run"
    ):
        open_survey("s3://lab/x.mdio", Storage(endpoint_url="http://127.0.0.1:1"))


def test_existing_destinations(tmp_path: Path, small: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("x")
    with pytest.raises(SurveyError, match=r"thesis exists; --overwrite replaces it"):
        ingest(small, str(tmp_path / "thesis"))
    with pytest.raises(SurveyError, match=r"thesis exists and is not an MDIO store; it is left alone"):
        ingest(small, str(tmp_path / "thesis"), overwrite=True)
    assert (tmp_path / "thesis" / "chapter1").exists()


def test_unwritable_destination(tmp_path: Path, small: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SurveyError, match=r"file/s.mdio: cannot write it: NotADirectoryError"):
        ingest(small, str(tmp_path / "file" / "s.mdio"))


def test_a_failure_leaves_nothing(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        (tmp_path / "s.mdio" / "zarr.json").write_text("{}")
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr("sfm.survey.ingest._convert", fail)
    with pytest.raises(SurveyError, match=r"small.sgy: multidimio cannot ingest it: RuntimeError: the disk is on fire"):
        ingest(small, str(tmp_path / "s.mdio"))
    assert not (tmp_path / "s.mdio").exists()


def test_bytes_outside_the_header() -> None:
    with pytest.raises(
        SurveyError, match=r"inline byte 238 lies outside a trace header; an int32 starts at byte 1 to 237"
    ):
        HeaderBytes(inline=238)


def test_bad_coordinate_scalar(tmp_path: Path, small: Path) -> None:
    data = bytearray(small.read_bytes())
    data[3600 + 70 : 3600 + 72] = (7).to_bytes(2, "big")
    (tmp_path / "s.sgy").write_bytes(data)
    with pytest.raises(
        SurveyError, match=r"the coordinate scalar \(trace header bytes 71-72\) is 7; SEG-Y knows 1, 10"
    ):
        ingest(tmp_path / "s.sgy", str(tmp_path / "s.mdio"))


def test_store_ends_with_its_context(tmp_path: Path) -> None:
    with DevStore(tmp_path) as store:
        assert store._process is not None
        pid = store._process.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_store_on_a_taken_port(tmp_path: Path, store: DevStore) -> None:
    with pytest.raises(DevStoreError, match=rf"cannot listen on port {store.port}: it is in use; take another"):
        DevStore(tmp_path, store.port).start()
