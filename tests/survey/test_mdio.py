"""Both generations of MDIO open as one kind of survey; anything else is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr

from sfm.spec import Storage
from sfm.survey.clients import SurveyError, storage_options
from sfm.survey.mdio import open_survey
from tests.survey.conftest import write_v0, write_v1

VALUES = np.random.default_rng(0).standard_normal((6, 7, 8)).astype("f4")
MASK = np.random.default_rng(1).random((6, 7)) < 0.7


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_v1(tmp_path: Path, zarr_format: int) -> None:
    survey = open_survey(write_v1(tmp_path / "s.mdio", VALUES, MASK, zarr_format=zarr_format))
    assert (survey.version, survey.shape, survey.chunks, survey.dtype) == ("v1", (6, 7, 8), (4, 5, 6), np.float32)
    assert [(a.name, a.unit) for a in survey.axes] == [("inline", ""), ("crossline", ""), ("time", "ms")]
    np.testing.assert_array_equal(survey.axes[1].coordinates, np.arange(100, 114, 2))
    np.testing.assert_array_equal(survey.trace_mask, MASK)
    assert survey.stored_statistics == {"count": 4, "mean": 2.0, "std": 1.0, "min": 0.0, "max": 3.0}


def test_v1_without_trace_mask_or_coordinates(tmp_path: Path) -> None:
    survey = open_survey(write_v1(tmp_path / "s.mdio", VALUES, coordinates=False))
    assert survey.trace_mask.all()
    np.testing.assert_array_equal(survey.axes[0].coordinates, np.arange(6))


def test_v1_with_a_member_this_zarr_cannot_parse(tmp_path: Path) -> None:
    url = write_v1(tmp_path / "s.mdio", VALUES, MASK)
    headers = Path(url) / "headers"
    headers.mkdir()
    (headers / "zarr.json").write_text((Path(url) / "amplitude/zarr.json").read_text().replace('"float32"', '"struct"'))
    np.testing.assert_array_equal(open_survey(url).array[0, MASK[0]], VALUES[0, MASK[0]])


def test_v0(tmp_path: Path) -> None:
    survey = open_survey(write_v0(tmp_path / "s.mdio", VALUES, MASK))
    assert (survey.version, survey.shape, survey.chunks, survey.axes[2].name) == ("v0", (6, 7, 8), (4, 5, 6), "sample")
    np.testing.assert_array_equal(survey.trace_mask, MASK)
    assert survey.stored_statistics == {"mean": 0.5, "std": 2.0}


@pytest.mark.parametrize(
    ("name", "version", "shape", "chunks"),
    [
        ("reef3d_v0.mdio.tar.gz", "v0", (76, 181, 268), (64, 64, 64)),
        ("cube75x71_v1_zarr2.mdio.tar.gz", "v1", (75, 71, 26), (128, 128, 128)),
    ],
)
def test_real_surveys(unpacked: Callable[[str], Path], name: str, version: str, shape: tuple, chunks: tuple) -> None:
    survey = open_survey(str(unpacked(name)))
    assert (survey.version, survey.shape, survey.chunks) == (version, shape, chunks)
    assert survey.trace_mask.all()
    assert survey.stored_statistics is not None
    assert survey.stored_statistics["std"] > 0


def test_prestack_is_refused(tmp_path: Path) -> None:
    url = write_v1(
        tmp_path / "s.mdio",
        np.zeros((2, 2, 3, 4), "f4"),
        chunks=(2, 2, 3, 4),
        names=("inline", "crossline", "offset", "time"),
    )
    with pytest.raises(
        SurveyError, match=r"s.mdio is a pre-stack survey with 4 dimensions \(inline, crossline, offset, ti"
    ):
        open_survey(url)


def test_2d_gathers_are_refused(tmp_path: Path) -> None:
    url = write_v1(tmp_path / "s.mdio", VALUES, attributes={"surveyType": "2D", "gatherType": "cdp"})
    with pytest.raises(SurveyError, match=r"s.mdio is a 2D cdp survey over .*; only 3D post-stack surveys are read"):
        open_survey(url)


def test_complex_amplitudes_are_refused(tmp_path: Path) -> None:
    url = write_v1(tmp_path / "s.mdio", VALUES.astype("c8"))
    with pytest.raises(SurveyError, match=r"amplitudes are stored as complex64; only real numbers are read"):
        open_survey(url)


def test_no_such_survey(tmp_path: Path) -> None:
    with pytest.raises(SurveyError, match=r"no survey at .*/absent.mdio; check the name, or make it with 'sfm ingest'"):
        open_survey(str(tmp_path / "absent.mdio"))


def test_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(SurveyError, match=r"is not an MDIO store: it holds no Zarr metadata at its root"):
        open_survey(str(tmp_path))
    with pytest.raises(
        SurveyError, match=r"notes.txt is not an MDIO store: it is a file, not a folder; 'sfm ingest' makes"
    ):
        open_survey(str(tmp_path / "notes.txt"))


def test_other_zarr(tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "g", mode="w").attrs["title"] = "x"
    with pytest.raises(SurveyError, match=r"is not an MDIO store: its root attributes state no MDIO version"):
        open_survey(str(tmp_path / "g"))
    zarr.create_array(tmp_path / "a", shape=(3,), dtype="f4")
    with pytest.raises(SurveyError, match=r"/a is not an MDIO store"):
        open_survey(str(tmp_path / "a"))


def test_damaged_metadata(tmp_path: Path) -> None:
    url = write_v1(tmp_path / "s.mdio", VALUES, MASK)
    (Path(url) / "amplitude" / "zarr.json").unlink()
    with pytest.raises(SurveyError, match=r"s.mdio is not an MDIO store: it has no array 'amplitude'"):
        open_survey(url)
    (Path(url) / "zarr.json").write_text("{")
    with pytest.raises(SurveyError, match=r"s.mdio is not an MDIO store: its root is no Zarr group"):
        open_survey(url)


def test_unknown_scheme() -> None:
    with pytest.raises(SurveyError, match=r"ftp://b/k: only local paths and s3://, gs://, az://, .* not 'ftp://'"):
        open_survey("ftp://b/k")
    with pytest.raises(SurveyError, match=r"names no bucket"):
        open_survey("s3://")


def test_options_come_from_the_environment_unless_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://from-environment")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    options = storage_options("s3://b/k", Storage())
    assert options["endpoint_url"] == "http://from-environment"
    assert options["client_kwargs"] == {"region_name": "eu-north-1"}
    options = storage_options("s3://b/k", Storage(endpoint_url="http://stated", region="x", anonymous=True))
    assert (options["endpoint_url"], options["client_kwargs"], options["anon"]) == (
        "http://stated",
        {"region_name": "x"},
        True,
    )
    assert storage_options("/local/path", Storage()) == {}
