"""What there is to say about a survey, for people and for programs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from sfm.survey.mdio import Axis, Survey, copies_of
from sfm.survey.statistics import Distribution, EmptyError, Statistics, disagreements


def facts(survey: Survey, examined: tuple[Statistics, Distribution] | EmptyError, clip: float) -> dict[str, Any]:
    """Everything `sfm survey info` knows, as plain data.

    Args:
        examined: its statistics, or why it has none.
    """
    return {
        "url": survey.url,
        "format": f"MDIO {survey.version}, Zarr v{survey.array.metadata.zarr_format}",
        "shape": list(survey.shape),
        "axes": [_axis(axis) for axis in survey.axes],
        "dtype": str(survey.dtype),
        "bytes": math.prod(survey.shape) * survey.dtype.itemsize,
        "chunks": list(survey.chunks),
        "chunk_count": math.prod(-(-n // c) for n, c in zip(survey.shape, survey.chunks, strict=True)),
        "codecs": codecs(survey),
        "copies": [{**asdict(copy), "chunks": list(copy.chunks)} for copy in copies_of(survey)],
        "traces": int(survey.trace_mask.size),
        "live_traces": int(survey.trace_mask.sum()),
        **(_none(survey, examined) if isinstance(examined, EmptyError) else statistical_facts(survey, *examined, clip)),
    }


def _none(survey: Survey, reason: EmptyError) -> dict[str, Any]:
    """In place of :func:`statistical_facts`."""
    nothing = {"estimated_statistics": None, "distribution": None, "stored_statistics": survey.stored_statistics}
    return {**nothing, "disagreements": [str(reason)]}


def statistical_facts(
    survey: Survey, statistics: Statistics, distribution: Distribution, clip: float
) -> dict[str, Any]:
    """What `sfm survey stats` knows, as plain data."""
    return {
        "url": survey.url,
        "estimated_statistics": {"clip_percent": clip, **statistics.to_json()},
        "distribution": distribution.to_json(),
        "stored_statistics": survey.stored_statistics,
        "disagreements": disagreements(distribution, survey.stored_statistics),
    }


def sentences(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The same facts as (label, words), for a terminal."""
    stored = found["stored_statistics"]
    share = found["live_traces"] / found["traces"]
    rows = [("survey", found["url"]), ("format", found["format"])]
    for axis in found["axes"]:
        unit = f" {axis['unit']}" if axis["unit"] else ""
        step = f", step {axis['step']:g}{unit}" if axis["step"] is not None else ", uneven steps"
        rows.append((axis["name"], f"{axis['size']:,} positions, {axis['first']:g} to {axis['last']:g}{unit}{step}"))
    rows += [
        ("amplitudes", f"{found['dtype']}, {_bytes(found['bytes'])} before compression"),
        (
            "chunks",
            f"{found['chunk_count']:,} of {' x '.join(map(str, found['chunks']))}, {', '.join(found['codecs'])}",
        ),
        *(("copy", _copy(copy)) for copy in found["copies"]),
        ("live traces", f"{found['live_traces']:,} of {found['traces']:,} ({share:.1%})"),
        *(_estimated(found) if found["estimated_statistics"] else []),
    ]
    if stored:
        rows.append(("stored", ", ".join(f"{k} {v:,.6g}" for k, v in stored.items() if v is not None)))
    if found["disagreements"]:
        rows.append(("but", "; ".join(found["disagreements"])))
    return rows


def _copy(copy: dict[str, Any]) -> str:
    chunks = f" in chunks of {' x '.join(map(str, copy['chunks']))}" if copy["chunks"] else ""
    return f"{copy['name']}{chunks}" + (f"; not read: {copy['reason']}" if copy["reason"] else "")


def _estimated(found: dict[str, Any]) -> list[tuple[str, str]]:
    estimated = found["estimated_statistics"]
    return [
        (
            "with data",
            f"{estimated['live_share']:.1%} of the voxels: the rest are missing, not finite, or traces of zeros",
        ),
        (
            "estimated",
            f"central {estimated['clip_percent']:g} % within {estimated['low']:.5g} to {estimated['high']:.5g}; "
            f"clipped to that: mean {estimated['mean']:.5g}, standard deviation {estimated['std']:.5g}",
        ),
    ]


def statistical_sentences(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What `sfm survey stats` knows, as (label, words), for a terminal."""
    seen, stored = found["distribution"], found["stored_statistics"] or {}
    rows = [
        ("survey", found["url"]),
        (
            "read",
            f"{seen['chunks']:,} of {seen['chunks_in_all']:,} chunks with live traces: {seen['voxels']:,} voxels with "
            f"data, {seen['zeros']:.1%} of them 0; {seen['live_traces']:.1%} of the traces are live",
        ),
        *_estimated(found),
        ("percentiles", ", ".join(f"{percent} %: {value:.5g}" for percent, value in seen["percentiles"].items())),
        ("", f"{'measured':>14} {'stored':>14}   nothing clipped; mean and std without zeros"),
    ]
    measured = {"count": None, "min": seen["minimum"], "max": seen["maximum"], "mean": seen["mean"], "std": seen["std"]}
    for name in (*measured, *(name for name in stored if name not in measured)):
        if name in stored or measured.get(name) is not None:
            rows.append((name, f"{_number(measured.get(name)):>14} {_number(stored.get(name)):>14}"))
    if not stored:
        rows.append(("stored", "the store states no statistics"))
    elif not found["disagreements"]:
        rows.append(("stored", "nothing read here contradicts the stored statistics"))
    return rows + [("but", said) for said in found["disagreements"]]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.6g}"


def codecs(survey: Survey) -> list[str]:
    """Names of what turns a chunk into bytes, outermost last, without byte order."""
    array = survey.array
    names = []
    serializer = (array.serializer,) if array.metadata.zarr_format == 3 else ()  # Zarr v2 has none
    for codec in (*array.filters, *serializer, *array.compressors):
        data: Any = codec.to_dict() if hasattr(codec, "to_dict") else codec.get_config()
        name = str(data.get("name") or data.get("id") or type(codec).__name__)
        settings = data.get("configuration") or data
        inner = settings.get("cname") if isinstance(settings, dict) else None
        if name not in ("bytes", "endian"):
            names.append(f"{name} ({getattr(inner, 'value', inner)})" if inner else name)
    return names or ["uncompressed"]


def _axis(axis: Axis) -> dict[str, Any]:
    steps = np.unique(np.diff(axis.coordinates))
    return {
        "name": axis.name,
        "unit": axis.unit,
        "size": len(axis.coordinates),
        "first": axis.coordinates[0].item(),
        "last": axis.coordinates[-1].item(),
        "step": (steps[0].item() if len(steps) else 0) if np.allclose(steps, steps[:1]) else None,
    }


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.3g} {unit}" if unit != "bytes" else f"{count:.0f} bytes"
        count /= 1024
    return f"{count:,.3g} TiB"
