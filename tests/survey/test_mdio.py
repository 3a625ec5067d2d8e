"""Both generations of MDIO open as one kind of survey; anything else is refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from zarr.codecs import BytesCodec

from benchmarks.bucket import Bucket
from sfm.spec import Storage
from sfm.survey import cli
from sfm.survey.clients import SurveyError, storage_options
from sfm.survey.mdio import open_survey
from sfm.survey.reader import WindowReader
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


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("kind", ["unknown type", "stale"])
def test_consolidated_metadata_is_not_believed(tmp_path: Path, kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((4, 5, 6)).astype("f4")
    url = write_v1(tmp_path / "s.mdio", values)
    zarr.consolidate_metadata(url)
    root = tmp_path / "s.mdio/zarr.json"
    stated = json.loads(root.read_text())
    members = stated["consolidated_metadata"]["metadata"]
    if kind == "stale":
        members["inline"]["shape"], members["amplitude"]["shape"] = [10], [10, 5, 6]
    else:
        members["headers"] = {**members["amplitude"], "data_type": {"name": "struct", "configuration": {"fields": []}}}
    root.write_text(json.dumps(stated))
    survey = open_survey(url)
    assert survey.shape == (4, 5, 6)
    np.testing.assert_array_equal(WindowReader(survey).read((0, 0, 0), (4, 5, 6)), values)


@pytest.mark.parametrize(
    "coordinates",
    [
        np.arange(24).reshape(6, 4),
        np.array(["a", "b", "c", "d", "e", "f"]),
        np.array([1, 2, np.nan, 4, 5, 6]),
        np.arange(6).astype("datetime64[ms]"),
    ],
    ids=["2-D", "words", "NaN", "dates"],
)
@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
def test_coordinates_that_are_no_numbers_along_the_axis_do_not_matter(tmp_path: Path, coordinates: np.ndarray) -> None:
    values = np.random.default_rng(0).standard_normal((4, 5, 6)).astype("f4")
    url = write_v1(tmp_path / "s.mdio", values)
    group = zarr.open_group(url, mode="r+", zarr_format=3)
    del group["time"]
    group.create_array("time", data=coordinates)
    survey = open_survey(url)
    assert survey.axes[2].coordinates.tolist() == list(range(6))
    for command in (["info", url], ["preview", url, "-o", str(tmp_path / "p.png")]):
        done = CliRunner().invoke(cli.survey, command, catch_exceptions=False)
        assert done.exit_code == 0, done.output


def test_stored_statistics_that_are_no_numbers_do_not_matter(tmp_path: Path) -> None:
    url = write_v1(tmp_path / "s.mdio", np.ones((4, 5, 6), "f4"))
    array = zarr.open_group(url, mode="r+", zarr_format=3)["amplitude"]
    array.attrs["statsV1"] = {"count": 3, "sum": "many", "sumSquares": 4.0}
    assert open_survey(url).stored_statistics is None


@pytest.mark.parametrize("url", ["s3://b/k", "gs://b/k", "az://b/k"])
@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "somewhere"])
def test_an_endpoint_that_is_no_url(monkeypatch: pytest.MonkeyPatch, url: str, endpoint: str) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "a")
    clients: list[Literal["obstore", "s3fs"]] = ["obstore", "s3fs"] if url.startswith("s3") else ["obstore"]
    for client in clients:
        with pytest.raises(SurveyError, match=f"endpoint {endpoint} is no URL; write http://{endpoint} or https://"):
            open_survey(url, Storage(endpoint_url=endpoint, client=client))


def test_half_a_pair_of_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = np.ones((4, 5, 6), "f4")
    write_v1(tmp_path / "surveys/s.mdio", values)
    with Bucket(tmp_path) as bucket:
        storage = Storage(endpoint_url=bucket.endpoint_url, region="us-east-1")
        for given, missing in (("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"), ("SECRET_ACCESS_KEY", "ACCESS_KEY_ID")):
            monkeypatch.setenv(f"AWS_{given}", "x")
            monkeypatch.delenv(f"AWS_{missing}", raising=False)
            with pytest.raises(SurveyError, match=f"AWS_{given} is set and AWS_{missing} is not; set both"):
                open_survey("s3://surveys/s.mdio", storage)
            public = storage.model_copy(update={"anonymous": True})
            reader = WindowReader(open_survey("s3://surveys/s.mdio", public))
            np.testing.assert_array_equal(reader.read((0, 0, 0), (4, 5, 6)), values)


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


def test_2d_lines_are_refused(tmp_path: Path) -> None:
    url = write_v1(tmp_path / "s.mdio", np.zeros((3, 4), "f4"), chunks=(3, 4), names=("cdp", "time"))
    with pytest.raises(SurveyError, match=r"s.mdio is a 2D line with 2 dimensions \(cdp, time\); only 3D post-stack"):
        open_survey(url)
    group = zarr.open_group(tmp_path / "old.mdio", mode="w", zarr_format=2)
    group.attrs.update({"api_version": "0.9.3", "dimension": [{"name": "cdp", "coords": [1]}]})
    with pytest.raises(SurveyError, match=r"old.mdio is a 2D line with 1 dimensions \(cdp\)"):
        open_survey(str(tmp_path / "old.mdio"))


@pytest.mark.parametrize(
    ("dtype", "named"),
    [("c8", "complex64"), ("c16", "complex128"), ("bool", "bool"), ("<U4", "<U4"), ("M8[s]", r"datetime64\[s\]")],
)
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
def test_amplitudes_that_are_no_real_numbers_are_refused(
    tmp_path: Path, dtype: str, named: str, zarr_format: int
) -> None:
    url = write_v1(tmp_path / "s.mdio", np.zeros((3, 4, 5), dtype), zarr_format=zarr_format)
    with pytest.raises(SurveyError, match=rf"amplitudes are stored as {named}; only real numbers are read"):
        open_survey(url)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", ">f8", "<f2", ">f2", "i1", "u1", "<i2", ">i2", "<u2", "<i4"])
def test_every_real_number_format_is_read(tmp_path: Path, dtype: str, zarr_format: int) -> None:
    values = (VALUES * 20).astype(dtype) if np.dtype(dtype).kind != "u" else (VALUES**2 * 20).astype(dtype)
    serializer = {"serializer": BytesCodec(endian="big" if dtype[0] == ">" else "little")}
    plain = np.dtype(dtype).itemsize == 1 or zarr_format == 2
    v1 = write_v1(tmp_path / "s.mdio", values, MASK, zarr_format=zarr_format, **({} if plain else serializer))
    for url in [v1] if zarr_format == 3 else [v1, write_v0(tmp_path / "old.mdio", values, MASK)]:
        survey = open_survey(url)
        assert survey.dtype.newbyteorder("=") == np.dtype(dtype).newbyteorder("=")
        reader = WindowReader(survey, keep=False)
        window = reader.read((1, 1, 1), (5, 6, 7))
        reader.close()
        np.testing.assert_array_equal(
            window, np.where(MASK[1:, 1:, None], values[1:, 1:, 1:].astype("f4"), np.float32(np.nan))
        )


def test_axes_and_variable_may_have_any_name(tmp_path: Path) -> None:
    url = write_v1(
        tmp_path / "s.mdio",
        VALUES,
        MASK,
        names=("il", "xl", "depth"),
        attributes={"defaultVariableName": "impedance"},
    )
    with pytest.raises(SurveyError, match=r"it has no array 'impedance'"):
        open_survey(url)
    (Path(url) / "amplitude").rename(Path(url) / "impedance")
    zarr.open_group(url)["depth"].attrs["unitsV1"] = {"length": "m"}
    survey = open_survey(url)
    assert [(axis.name, axis.unit) for axis in survey.axes] == [("il", ""), ("xl", ""), ("depth", "m")]
    reader = WindowReader(survey, keep=False)
    np.testing.assert_array_equal(reader.read((0, 0, 0), (6, 7, 8))[MASK], VALUES[MASK])
    reader.close()


def test_a_survey_of_one_voxel(tmp_path: Path) -> None:
    one = np.full((1, 1, 1), 3.5, "f4")
    v1 = write_v1(tmp_path / "s.mdio", one, np.ones((1, 1), bool), chunks=(1, 1, 1))
    for url in (v1, write_v0(tmp_path / "old.mdio", one, np.ones((1, 1), bool))):
        survey = open_survey(url, window=(1, 1, 1))
        reader = WindowReader(survey)
        assert reader.read((0, 0, 0), (1, 1, 1)).item() == 3.5
        reader.close()


def test_attributes_that_make_no_sense(tmp_path: Path) -> None:
    url = write_v1(tmp_path / "s.mdio", VALUES, MASK)
    zarr.open_group(url).create_array("trace_mask", data=MASK[:5, :6], overwrite=True)
    with pytest.raises(SurveyError, match=r"its trace mask has shape \(5, 6\), its traces \(6, 7\)"):
        open_survey(url)
    old = write_v0(tmp_path / "old.mdio", VALUES, MASK)
    group = zarr.open_group(old, mode="r+")
    dimensions = group.attrs["dimension"]
    group.attrs["dimension"] = [*dimensions[:2], {"name": "sample", "coords": [1, 2]}]  # type: ignore[misc]
    with pytest.raises(SurveyError, match=r"axis sample has 8 positions but 2 coordinates"):
        open_survey(old)
    group.attrs["dimension"] = "none"
    with pytest.raises(SurveyError, match=r"old.mdio is not an MDIO store: it is damaged or incomplete"):
        open_survey(old)
    group.attrs["dimension"] = dimensions
    zarr.open_group(old, mode="r+").create_array(
        "data/chunked_012", shape=(6, 7), chunks=(6, 7), dtype="f4", overwrite=True
    )
    with pytest.raises(SurveyError, match=r"'data/chunked_012' has 2 dimensions, its survey 3"):
        open_survey(old)


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
