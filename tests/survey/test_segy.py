"""A SEG-Y file that cannot become a survey is told so before anything is read in full."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sfm.survey import segy
from sfm.survey.clients import SurveyError
from sfm.survey.synth import Recipe, synthesise
from tests.survey.conftest import real


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("segy") / "s.sgy"
    synthesise(path, Recipe(size=(20, 16, 64), dead=0))
    return path


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    path = tmp_path / "s.sgy"
    path.write_bytes(original.read_bytes())
    return path


def patch(path: Path, byte: int, value: int, kind: str = ">i2") -> None:
    data = bytearray(path.read_bytes())
    field = np.array(value, kind).tobytes()
    data[byte - 1 : byte - 1 + len(field)] = field
    path.write_bytes(data)


def patch_traces(path: Path, byte: int, values: np.ndarray) -> None:
    data = np.fromfile(path, np.uint8)
    rows = data[3600:].reshape(320, -1)
    rows[:, byte - 1 : byte + 3] = values.astype(">i4")[:, None].view(np.uint8).reshape(320, 4)
    data.tofile(path)


def test_layout(original: Path) -> None:
    file = segy.inspect(original)
    assert (file.byte_order, file.format_code, file.samples, file.interval, file.traces) == (">", 5, 64, 4.0, 320)
    assert segy.check_lines(file, 189, 193).places == 320


@pytest.mark.parametrize(
    ("name", "format_name", "traces", "lines"),
    [
        ("reef3d.sgy", "IBM float32", 13756, (76, 181)),
        ("f3_crop.sgy", "int16", 414, (23, 18)),
        ("f3_sparse.sgy", "IBM float32", 598, (23, 26)),
        ("cube75x71.sgy", "IEEE float32", 5325, (75, 71)),
    ],
)
def test_real_files(name: str, format_name: str, traces: int, lines: tuple[int, int]) -> None:
    file = segy.inspect(real(name))
    assert (file.format_name, file.traces) == (format_name, traces)
    grid = segy.check_lines(file, 189, 193)
    assert (grid.inlines[2], grid.crosslines[2]) == lines


def test_absent(tmp_path: Path) -> None:
    with pytest.raises(SurveyError, match=r"SEG-Y file .*none.sgy: No such file or directory"):
        segy.inspect(tmp_path / "none.sgy")


def test_not_segy(tmp_path: Path, copy: Path) -> None:
    (tmp_path / "short").write_text("hello")
    with pytest.raises(
        SurveyError, match=r"short is not SEG-Y: it has 5 bytes, fewer than its headers alone would need"
    ):
        segy.inspect(tmp_path / "short")
    patch(copy, 3225, 77)
    with pytest.raises(
        SurveyError, match=r"s.sgy is not SEG-Y that can be read: its binary header states format code 77"
    ):
        segy.inspect(copy)


def test_truncated(copy: Path) -> None:
    copy.write_bytes(copy.read_bytes()[:-300])
    with pytest.raises(
        SurveyError,
        match=r"s.sgy is truncated, or .*: 162,\d+ bytes hold 319 whole traces of 496 bytes \(64 samples, IEEE float32\) "
        r"and 196 bytes of another; copy it again",
    ):
        segy.inspect(copy)


def test_no_sample_interval(copy: Path) -> None:
    patch(copy, 3217, 0)
    with pytest.raises(
        SurveyError, match=r"the sample interval in its binary header .* is 0, while trace headers say 4; corr"
    ):
        segy.inspect(copy)


def test_wrong_bytes_and_the_right_ones(copy: Path) -> None:
    file = segy.inspect(copy)
    with pytest.raises(
        SurveyError,
        match=r"s.sgy: inline 0-0 \(1 value\) at byte 233, crossline 0-0 \(1 value\) at byte 237 do not index the 320 traces: "
        r"all inline numbers are equal; bytes 189 and 193 hold a grid of 20 x 16 lines: "
        r"try --inline-byte 189 --crossline-byte 193",
    ):
        segy.check_lines(file, 233, 237)


def test_lines_at_unusual_bytes_are_found(copy: Path) -> None:
    file = segy.inspect(copy)
    inline, crossline = file.header(189), file.header(193)
    for byte in (189, 193):
        patch_traces(copy, byte, np.zeros(320))
    patch_traces(copy, 17, inline)
    patch_traces(copy, 25, crossline)
    patch_traces(copy, 9, np.zeros(320))
    with pytest.raises(SurveyError, match=r"try --inline-byte 17 --crossline-byte 25"):
        segy.check_lines(file, 189, 193)
    for byte in (17, 21, 25, 181, 185):
        patch_traces(copy, byte, np.zeros(320))
    with pytest.raises(
        SurveyError, match=r"all inline numbers are equal; none of the usual bytes holds line numbers either"
    ):
        segy.check_lines(file, 189, 193)


def test_duplicates_and_counters(copy: Path) -> None:
    file = segy.inspect(copy)
    crossline = file.header(193)
    patch_traces(copy, 193, np.minimum(crossline, 2010))
    with pytest.raises(SurveyError, match=r"120 traces share their place with another"):
        segy.check_lines(file, 189, 193)
    with pytest.raises(SurveyError, match=r"the grid would have 6,400 places for 320 traces"):
        segy.check_lines(file, 189, 1)


def test_coordinates_elsewhere(copy: Path) -> None:
    file = segy.inspect(copy)
    assert segy.coordinates_advice(file, 181, 185) is None
    assert segy.coordinates_advice(file, 73, 77) == (
        "bytes 73 and 77 hold no coordinates, bytes 181 and 185 seem to: --x-byte 181 --y-byte 185 would keep them"
    )
