"""What a SEG-Y file holds, judged by its size and headers alone, before hours are spent on its samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sfm.survey.clients import SurveyError

FILE_HEADER = 3600
TRACE_HEADER = 240

# Bytes per sample of each format code of the standard (revision 2.1) that stands for one number.
_SAMPLE_BYTES = {1: 4, 2: 4, 3: 2, 5: 4, 6: 8, 8: 1, 10: 4, 11: 2, 12: 8, 16: 1}
_FORMATS = {
    1: "IBM float32", 2: "int32", 3: "int16", 5: "IEEE float32", 6: "float64", 8: "int8", 10: "uint32", 11: "uint16",
    12: "uint64", 16: "uint8",
}  # fmt: skip

# Where software has put inline and crossline numbers: the standard since 2002, then older habits.
_USUAL_LINES = ((189, 193), (9, 13), (9, 21), (17, 25), (5, 21), (221, 225), (233, 237), (17, 13), (13, 21), (181, 185))
_USUAL_COORDINATES = ((181, 185), (73, 77), (81, 85), (201, 205))


@dataclass(frozen=True)
class SegyFile:
    """Layout of a SEG-Y file on disk."""

    path: Path
    byte_order: str
    """'>' big-endian, as the standard has it, or '<'."""
    format_code: int
    samples: int
    """Samples per trace."""
    interval: float
    """Milliseconds (or metres, feet) between samples."""
    traces: int
    extended_headers: int
    """Textual headers of 3200 bytes after the first."""

    @property
    def trace_bytes(self) -> int:
        """Bytes of a trace with its header."""
        return TRACE_HEADER + self.samples * _SAMPLE_BYTES[self.format_code]

    @property
    def format_name(self) -> str:
        """Number format of the samples."""
        return _FORMATS[self.format_code]

    def header(self, byte: int, kind: str = "i4") -> np.ndarray:
        """A field of every trace header, [traces] int64, by its first byte counted from 1."""
        start = FILE_HEADER + 3200 * self.extended_headers
        shape = (self.traces, self.trace_bytes)
        rows = np.memmap(self.path, np.uint8, "r", offset=start, shape=shape)
        width = np.dtype(kind).itemsize
        field = np.ascontiguousarray(rows[:, byte - 1 : byte - 1 + width])
        return field.view(self.byte_order + kind)[:, 0].astype(np.int64)


@dataclass(frozen=True)
class LineGrid:
    """The grid that inline and crossline numbers of all traces span."""

    inline_byte: int
    crossline_byte: int
    inlines: tuple[int, int, int]
    """(first, last, how many)."""
    crosslines: tuple[int, int, int]
    traces: int
    places: int
    """Distinct (inline, crossline) pairs."""

    @property
    def problem(self) -> str | None:
        """Why this cannot be the grid of a 3D survey, or None."""
        cells = self.inlines[2] * self.crosslines[2]
        if self.traces > 1 and self.inlines[2] == 1:
            return "all inline numbers are equal"
        if self.traces > 1 and self.crosslines[2] == 1:
            return "all crossline numbers are equal"
        if self.places < self.traces:
            return f"{self.traces - self.places:,} traces share their place with another"
        # Every number occurring once is a counter, not a line; multidimio refuses grids ten times too large.
        if cells > 10 * self.traces or (self.traces > 4 and self.traces in (self.inlines[2], self.crosslines[2])):
            return f"the grid would have {cells:,} places for {self.traces:,} traces"
        return None

    def describe(self) -> str:
        """Ranges in words."""
        (i0, i1, ni), (x0, x1, nx) = self.inlines, self.crosslines
        return (
            f"inline {i0}-{i1} ({ni} value{'s' * (ni != 1)}) at byte {self.inline_byte}, "
            f"crossline {x0}-{x1} ({nx} value{'s' * (nx != 1)}) at byte {self.crossline_byte}"
        )


def inspect(path: str | Path) -> SegyFile:
    """Read the layout of a SEG-Y file and see that its size agrees.

    Raises:
        SurveyError: it is absent, not SEG-Y, of a format not known here, or truncated.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(FILE_HEADER)
    except OSError as error:
        raise SurveyError(f"SEG-Y file {path}: {error.strerror}") from None
    if size < FILE_HEADER + TRACE_HEADER:
        raise SurveyError(f"{path} is not SEG-Y: it has {size:,} bytes, fewer than its headers alone would need")

    def number(byte: int, kind: str) -> int:
        return int(np.frombuffer(head, kind, 1, byte - 1)[0])

    order = next((o for o in "><" if number(3225, o + "i2") in _SAMPLE_BYTES), None)
    if order is None or number(3221, order + "u2") == 0:
        raise SurveyError(
            f"{path} is not SEG-Y that can be read: its binary header states format code {number(3225, '>i2')} and "
            f"{number(3221, '>u2')} samples per trace; known codes: {', '.join(map(str, _FORMATS))}"
        )
    extended = number(3505, order + "i2")
    if extended < 0:
        raise SurveyError(
            f"{path}: a variable number of extended textual headers is not supported; write the file without"
        )
    code, samples = number(3225, order + "i2"), number(3221, order + "u2")
    trace_bytes = TRACE_HEADER + samples * _SAMPLE_BYTES[code]
    traces, rest = divmod(size - FILE_HEADER - 3200 * extended, trace_bytes)
    if traces < 1 or rest:
        raise SurveyError(
            f"{path} is truncated, or its binary header is wrong: {size:,} bytes hold {max(traces, 0):,} whole traces "
            f"of {trace_bytes:,} bytes ({samples} samples, {_FORMATS[code]}) and {rest:,} bytes of another; "
            "copy it again"
        )
    file_ = SegyFile(path, order, code, samples, number(3217, order + "u2") / 1000, traces, extended)
    if not file_.interval:
        interval = float(file_.header(117, "u2")[0]) / 1000
        raise SurveyError(
            f"{path}: the sample interval in its binary header (bytes 3217-3218) is 0"
            + (f", while trace headers say {interval:g}" if interval else "")
            + "; correct the header"
        )
    return file_


def line_grid(file: SegyFile, inline_byte: int, crossline_byte: int) -> LineGrid:
    """The grid that the numbers at these bytes (int32) span."""
    inline, crossline = file.header(inline_byte), file.header(crossline_byte)
    pairs = np.unique((inline << 32) + (crossline & 0xFFFFFFFF)).size
    ranges = [(int(v.min()), int(v.max()), int(np.unique(v).size)) for v in (inline, crossline)]
    return LineGrid(inline_byte, crossline_byte, ranges[0], ranges[1], file.traces, pairs)


def check_lines(file: SegyFile, inline_byte: int, crossline_byte: int) -> LineGrid:
    """See that these bytes hold the line numbers of a 3D survey.

    Raises:
        SurveyError: they do not; with what was found there, and which usual bytes would do.
    """
    grid = line_grid(file, inline_byte, crossline_byte)
    if grid.problem is None:
        return grid
    advice = (
        "none of the usual bytes holds line numbers either, so ask where the file comes from for its byte positions"
    )
    for inline, crossline in _USUAL_LINES:
        other = line_grid(file, inline, crossline)
        cells = other.inlines[2] * other.crosslines[2]
        if other.problem is None and cells < 2 * file.traces:
            advice = (
                f"bytes {inline} and {crossline} hold a grid of {other.inlines[2]} x {other.crosslines[2]} lines: "
                f"try --inline-byte {inline} --crossline-byte {crossline}"
            )
            break
    raise SurveyError(
        f"{file.path}: {grid.describe()} do not index the {file.traces:,} traces: {grid.problem}; {advice}"
    )


def coordinates_advice(file: SegyFile, x_byte: int, y_byte: int) -> str | None:
    """A hint where the coordinates are, when these bytes hold none."""

    def vary(x: int, y: int) -> bool:
        return bool(np.ptp(file.header(x)) or np.ptp(file.header(y)))

    if file.traces < 2 or vary(x_byte, y_byte):
        return None
    for x, y in _USUAL_COORDINATES:
        if vary(x, y):
            return (
                f"bytes {x_byte} and {y_byte} hold no coordinates, bytes {x} and {y} seem to: "
                f"--x-byte {x} --y-byte {y} would keep them"
            )
    return f"bytes {x_byte} and {y_byte} hold no coordinates; the survey is indexed by its line numbers alone"
