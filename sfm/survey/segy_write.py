"""Write a post-stack volume as SEG-Y revision 1, big-endian IEEE float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_COORDINATE_SCALAR = -100  # coordinates are stored in centimetres


@dataclass(frozen=True)
class TraceTable:
    """What the header of every trace of a volume says, each array (inlines, crosslines)."""

    inline: np.ndarray
    crossline: np.ndarray
    x: np.ndarray
    """Metres."""
    y: np.ndarray
    live: np.ndarray
    """bool; absent traces are not written."""
    dead: np.ndarray
    """bool; written, marked dead (trace identification code 2)."""


def write(path: Path, values: np.ndarray, table: TraceTable, interval: float, delay: int, text: Sequence[str]) -> None:
    """Write `values` inline by inline.

    Args:
        values: (inlines, crosslines, samples) float32.
        interval: milliseconds between samples.
        delay: milliseconds from time zero to the first sample.
        text: up to 40 lines of at most 76 characters, for the textual header.
    """
    samples = values.shape[2]
    dtype = _trace_dtype(samples)
    with path.open("wb") as file:
        file.write(_text_header(text))
        file.write(_binary_header(samples, interval))
        written = 0
        for line in range(len(values)):
            live = table.live[line]
            traces = np.zeros(int(live.sum()), dtype)
            number = np.arange(written + 1, written + 1 + len(traces))
            traces["sequence_line"] = traces["sequence_file"] = number
            traces["field_record"] = traces["inline"] = table.inline[line, live]
            traces["ensemble"] = traces["crossline"] = table.crossline[line, live]
            traces["identification"] = np.where(table.dead[line, live], 2, 1)
            traces["coordinate_scalar"] = _COORDINATE_SCALAR
            traces["coordinate_unit"] = 1
            traces["delay"] = delay
            traces["samples"] = samples
            traces["interval"] = round(interval * 1000)
            traces["cdp_x"] = np.round(table.x[line, live] * -_COORDINATE_SCALAR)
            traces["cdp_y"] = np.round(table.y[line, live] * -_COORDINATE_SCALAR)
            traces["values"] = values[line, live]
            file.write(traces.tobytes())
            written += len(traces)


def _trace_dtype(samples: int) -> np.dtype:
    fields = {  # name: (first byte counted from 1, type)
        "sequence_line": (1, ">i4"),
        "sequence_file": (5, ">i4"),
        "field_record": (9, ">i4"),
        "ensemble": (21, ">i4"),
        "identification": (29, ">i2"),
        "coordinate_scalar": (71, ">i2"),
        "coordinate_unit": (89, ">i2"),
        "delay": (109, ">i2"),
        "samples": (115, ">u2"),
        "interval": (117, ">u2"),
        "cdp_x": (181, ">i4"),
        "cdp_y": (185, ">i4"),
        "inline": (189, ">i4"),
        "crossline": (193, ">i4"),
        "values": (241, f"({samples},)>f4"),
    }
    return np.dtype(
        {
            "names": list(fields),
            "formats": [kind for _, kind in fields.values()],
            "offsets": [byte - 1 for byte, _ in fields.values()],
            "itemsize": 240 + 4 * samples,
        }
    )


def _text_header(text: Sequence[str]) -> bytes:
    lines = [*text, *[""] * 40][:40]
    lines[38], lines[39] = "SEG Y REV1", "END TEXTUAL HEADER"
    return "".join(f"C{n:2d} {line[:76]:76s}" for n, line in enumerate(lines, start=1)).encode("cp037")


def _binary_header(samples: int, interval: float) -> bytes:
    header = np.zeros(400, np.uint8)

    def put(byte: int, value: int, kind: str = ">i2") -> None:
        field = np.array([value], kind).view(np.uint8)
        header[byte - 3201 : byte - 3201 + len(field)] = field

    put(3201, 1, ">i4")  # job
    put(3213, 1)  # traces per ensemble
    put(3217, round(interval * 1000), ">u2")
    put(3219, round(interval * 1000), ">u2")
    put(3221, samples, ">u2")
    put(3223, samples, ">u2")
    put(3225, 5)  # IEEE float32
    put(3227, 1)  # fold
    put(3229, 4)  # horizontally stacked
    put(3255, 1)  # metres
    put(3501, 0x0100, ">u2")  # revision 1.0
    put(3503, 1)  # all traces alike
    return header.tobytes()
