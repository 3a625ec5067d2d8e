"""Copies in other chunks are read where a window gains by it, and only if they hold the same values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec
from zarr.codecs.numcodecs import ZFPY, BitRound

from sfm.survey import cli
from sfm.survey.copies import cheapest, chunks_met, expected_bytes
from sfm.survey.mdio import copies_of, open_survey
from sfm.survey.reader import WindowReader
from tests.survey.conftest import write_v0, write_v1

pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")

VALUES = np.random.default_rng(0).standard_normal((24, 24, 24)).astype("f4")
MASK = np.random.default_rng(1).random((24, 24)) < 0.8
NAMES = ("inline", "crossline", "time")
SLAB = (2, 24, 24)


@given(size=st.integers(1, 40), window=st.integers(1, 50), chunk=st.integers(1, 50))
def test_chunks_met_is_the_mean_over_all_origins(size: int, window: int, chunk: int) -> None:
    window = min(window, size)
    met = [(o + window - 1) // chunk - o // chunk + 1 for o in range(size - window + 1)]
    assert chunks_met(size, window, chunk) == pytest.approx(np.mean(met), rel=1e-12)


def test_cheapest() -> None:
    shape, cubes = (1024, 1024, 1024), (128, 128, 128)
    flat = [(4, 512, 512), (512, 4, 512), (512, 512, 4)]
    choice = [cubes, *flat]
    assert cheapest(shape, (128, 128, 128), choice, 4) == 0
    assert [cheapest(shape, w, choice, 4) for w in ((1, 512, 512), (512, 1, 512), (512, 512, 1))] == [1, 2, 3]
    assert cheapest(shape, (4, 4, 4), [cubes, cubes], 4) == 0
    assert expected_bytes((128, 128, 128), (5, 5, 5), cubes, 2) == 2 * 128**3


def add_copy(
    url: str,
    name: str,
    values: np.ndarray,
    chunks: Sequence[int] = (2, 12, 24),
    zarr_format: int = 3,
    **options: object,
) -> None:
    """Write `values`, dead traces included, beside the amplitudes."""
    fill = options.pop("fill_value", np.nan if name.startswith("fast") and values.dtype.kind == "f" else 0)
    names = options.pop("names", NAMES)
    keywords = {"dimension_names": names} if zarr_format == 3 else {}
    group = zarr.open_group(url, mode="r+", zarr_format=zarr_format, use_consolidated=False)
    array = group.create_array(
        name, shape=values.shape, chunks=tuple(chunks), dtype=values.dtype, fill_value=fill, **keywords, **options
    )
    array[...] = values


def windows(url: str, window: tuple[int, int, int]) -> list[np.ndarray]:
    rng, found = np.random.default_rng(2), []
    reader = WindowReader(open_survey(url, window=window), keep=False)
    for _ in range(4):
        origin = tuple(int(rng.integers(n - w + 1)) for n, w in zip(VALUES.shape, window, strict=True))
        found.append(reader.read(origin, window))  # type: ignore[arg-type]
    reader.close()
    return found


@pytest.mark.parametrize("version", ["v0", "v1", "v1-zarr2"])
def test_the_copy_that_suits_the_window_is_read(tmp_path: Path, version: str) -> None:
    zarr_format = 3 if version == "v1" else 2
    if version == "v0":
        url, names = write_v0(tmp_path / "s", VALUES, MASK, (8, 8, 8)), ["data/chunked_12", "data/chunked_01"]
    else:
        url, names = write_v1(tmp_path / "s", VALUES, MASK, (8, 8, 8), zarr_format), ["fast_inline", "fast_time"]
    stored = np.asarray(open_survey(url).array[...])
    plain = [windows(url, shape) for shape in (SLAB, (8, 8, 8))]
    for name, chunks in zip(names, ((2, 12, 24), (24, 12, 2)), strict=True):
        add_copy(url, name, stored, chunks, zarr_format)
    inline = open_survey(url, window=SLAB)
    assert (inline.array.path, inline.chunks) == (names[0], (2, 12, 24))
    assert inline.stored_statistics == open_survey(url).stored_statistics
    assert inline.identity != open_survey(url).identity
    assert open_survey(url, window=(24, 24, 1)).array.path == names[1]
    assert open_survey(url, window=(8, 8, 8)).chunks == open_survey(url).chunks == (8, 8, 8)
    for before, after in zip(plain, [windows(url, shape) for shape in (SLAB, (8, 8, 8))], strict=True):
        np.testing.assert_array_equal(before, after)
    assert sorted(copy.name for copy in copies_of(inline)) == sorted(names)
    assert [copy.reason for copy in copies_of(inline)] == ["", ""]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"serializer": ZFPY(mode=4, tolerance=0.01), "compressors": None}, "it is stored by zfpy, which may change v"),
        ({"filters": BitRound(keepbits=8)}, "it is stored by bitround, which may change values"),
        ({"shards": (4, 12, 24), "filters": BitRound(keepbits=8)}, "it is stored by bitround, which may change values"),
        ({"values": VALUES[:20]}, "its shape is 20 x 24 x 24"),
        ({"values": VALUES.astype("f8")}, "its numbers are float64"),
        ({"fill_value": 0.0}, "chunks that are not stored mean 0.0 in it, not nan"),
        ({"names": ("time", "crossline", "inline")}, "its dimensions are time, crossline, inline"),
    ],
)
def test_a_copy_that_may_differ_is_left_alone(tmp_path: Path, change: dict, reason: str) -> None:
    url = write_v1(tmp_path / "s.mdio", VALUES, chunks=(8, 8, 8))
    add_copy(url, "fast_inline", **{"values": VALUES, **change})
    assert open_survey(url, window=SLAB).array.path == "amplitude"
    (copy,) = copies_of(open_survey(url))
    assert copy.reason.startswith(reason)


def test_the_copy_of_lossy_amplitudes_is_left_alone(tmp_path: Path) -> None:
    url = write_v0(tmp_path / "s.mdio", VALUES, MASK, (8, 8, 8), compressors=numcodecs.ZFPY(mode=4, tolerance=0.01))
    add_copy(url, "data/chunked_12", VALUES, zarr_format=2)
    assert open_survey(url, window=SLAB).array.path == "data/chunked_012"
    (copy,) = copies_of(open_survey(url))
    assert copy.reason == "the amplitudes are stored by zfpy, which may change values"


@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("kind", ["other values", "broken off", "never filled"])
def test_a_copy_with_other_values_is_left_alone(tmp_path: Path, version: str, kind: str) -> None:
    if version == "v0":
        url, name, zarr_format = write_v0(tmp_path / "s", VALUES, MASK, (8, 8, 8)), "data/chunked_12", 2
    else:
        url, name, zarr_format = write_v1(tmp_path / "s", VALUES, chunks=(8, 8, 8)), "fast_inline", 3
    stored = np.asarray(open_survey(url).array[...])
    fill = open_survey(url).array.fill_value
    other = {"other values": 2 * stored, "broken off": stored.copy(), "never filled": np.full_like(stored, fill)}[kind]
    if kind == "broken off":
        other[18:] = fill
    add_copy(url, name, other, (2, 12, 24), zarr_format)
    assert open_survey(url, window=SLAB).array.path == open_survey(url).array.path


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_chunks_that_a_copy_lacks_are_those_of_the_amplitudes(tmp_path: Path, version: str) -> None:
    if version == "v0":
        url, name, zarr_format = write_v0(tmp_path / "s", VALUES, MASK, (8, 8, 8)), "data/chunked_12", 2
    else:
        url, name, zarr_format = write_v1(tmp_path / "s", VALUES, chunks=(8, 8, 8)), "fast_inline", 3
    expected = windows(url, (24, 24, 24))[0]
    add_copy(url, name, np.asarray(open_survey(url).array[...]), (2, 12, 24), zarr_format)
    survey = open_survey(url, window=SLAB)
    assert survey.array.path == name
    Path(url, name, "5.1.0" if version == "v0" else "c/5/1/0").unlink()
    reader = WindowReader(survey, keep=False)
    np.testing.assert_array_equal(reader.read((0, 0, 0), (24, 24, 24)), expected)
    np.testing.assert_array_equal(reader.read((11, 5, 2), (9, 10, 20)), expected[11:20, 5:15, 2:22])
    assert reader.transfers.meter.now().absent_chunks == 2
    reader.close()


def test_shards_and_other_compressors_are_no_obstacle(tmp_path: Path) -> None:
    url = write_v1(tmp_path / "s.mdio", VALUES, chunks=(8, 8, 8))
    add_copy(
        url, "fast_inline", VALUES, shards=(4, 24, 24), serializer=BytesCodec(), compressors=BloscCodec(cname="lz4")
    )
    assert open_survey(url, window=SLAB).chunks == (2, 12, 24)
    np.testing.assert_array_equal(windows(url, (24, 24, 24))[0], VALUES)


def test_a_copy_this_zarr_cannot_parse_does_not_matter(tmp_path: Path) -> None:
    url = write_v1(tmp_path / "s.mdio", VALUES, chunks=(8, 8, 8))
    for name, text in (
        ("fast_inline", (Path(url) / "amplitude/zarr.json").read_text().replace('"float32"', '"struct"')),
        ("fast_time", "{"),
    ):
        (Path(url) / name).mkdir()
        (Path(url) / name / "zarr.json").write_text(text)
    add_copy(url, "fast_crossline", VALUES, (24, 2, 24))
    assert open_survey(url, window=SLAB).array.path == "amplitude"
    assert open_survey(url, window=(24, 2, 24)).array.path == "fast_crossline"
    assert ["cannot be opened" in copy.reason for copy in copies_of(open_survey(url))] == [True, False, True]


def test_info_lists_copies(tmp_path: Path) -> None:
    url = write_v1(tmp_path / "s.mdio", VALUES, chunks=(8, 8, 8))
    add_copy(url, "fast_inline", VALUES)
    add_copy(url, "fast_time", VALUES, (24, 12, 2), filters=BitRound(keepbits=8))
    out = CliRunner().invoke(cli.survey, ["info", url], catch_exceptions=False).output
    assert "copy         fast_inline in chunks of 2 x 12 x 24\n" in out
    assert "copy         fast_time in chunks of 24 x 12 x 2; not read: it is stored by bitround, which may" in out
    found = json.loads(CliRunner().invoke(cli.survey, ["info", url, "--json"], catch_exceptions=False).output)
    assert found["copies"][0] == {"name": "fast_inline", "chunks": [2, 12, 24], "reason": ""}
