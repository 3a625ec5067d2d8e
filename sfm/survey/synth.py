"""A synthetic post-stack survey as SEG-Y, with the geology it was made from beside it."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sfm.survey import segy_write
from sfm.survey.clients import SurveyError
from sfm.survey.geology import Earth, Frame

_DELAY = 400  # ms: the shallowest part of a survey is seldom kept
_SLAB = 16  # inlines at a time
_RMS = 1000.0  # of the signal, in the arbitrary unit that amplitudes have


@dataclass(frozen=True)
class Recipe:
    """What to make. The same recipe gives the same bytes."""

    seed: int = 0
    size: tuple[int, int, int] = (192, 192, 256)
    """(inline, crossline, sample)."""
    interval: float = 4.0
    """Milliseconds between samples."""
    frequency: float = 30.0
    """Peak frequency (Hz) of the zero-phase Ricker wavelet in the middle; higher above, lower below."""
    signal_to_noise: float = 5.0
    """Ratio of root mean squares."""
    salt: bool = False
    """Whether a salt diapir pierces the layers."""
    missing: bool = False
    """Whether the survey has an irregular outline and a hole."""
    dead: int = 5
    """Traces that are there but dead: all zero."""

    def __post_init__(self) -> None:
        if min(self.size) < 16 or self.size[2] > 32767:
            raise SurveyError(
                f"size {self.size}: at least 16 positions along each axis and at most 32767 samples are made"
            )
        nyquist = 500 / self.interval if self.interval > 0 else 0
        if not 0 < 2 * self.frequency < nyquist or self.interval > 65:
            raise SurveyError(
                f"interval {self.interval:g} ms carries frequencies up to {nyquist:g} Hz; a wavelet of "
                f"{self.frequency:g} Hz needs more than twice its peak frequency: take a smaller interval or a lower frequency"
            )
        if self.signal_to_noise <= 0 or self.dead < 0:
            raise SurveyError("signal to noise must be above 0, and dead traces 0 or more")


def synthesise(path: str | Path, recipe: Recipe | None = None) -> dict[str, Any]:
    """Write the survey to `path` (.sgy) and its geology beside it (.geology.json).

    Returns:
        The geology: what was written beside it.

    Raises:
        SurveyError: the file cannot be written.
    """
    path, recipe = Path(path), recipe or Recipe()
    frame = Frame(*recipe.size, interval=recipe.interval)
    earth = Earth(frame, recipe.seed, recipe.salt)
    values = _amplitudes(earth, recipe)
    table, grid = _table(frame, recipe)
    values[table.dead] = 0
    geology = {
        "recipe": vars(recipe),
        "grid": grid,
        "first_sample_ms": _DELAY,
        "wavelet": {
            "kind": "Ricker, zero phase",
            "peak_hz": {"first_sample": 1.2 * recipe.frequency, "last_sample": 0.8 * recipe.frequency},
            "polarity": "an increase of impedance is a positive amplitude",
        },
        "noise": {"signal_to_noise_rms": recipe.signal_to_noise, "band_limited_share": 0.8},
        "dead_traces": [
            [int(table.inline[p]), int(table.crossline[p])] for p in zip(*np.nonzero(table.dead), strict=True)
        ],
        "live_share": round(float(table.live.mean()), 4),
        **earth.describe(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        segy_write.write(path, values, table, recipe.interval, _DELAY, _text(recipe, frame, grid))
        path.with_suffix(".geology.json").write_text(json.dumps(geology, indent=1))
    except OSError as error:
        raise SurveyError(f"cannot write {path}: {error.strerror}") from None
    return geology


def _amplitudes(earth: Earth, recipe: Recipe) -> np.ndarray:
    """(inline, crossline, sample) float32: reflectivity through the wavelet, blurred sideways, and noise."""
    inlines, _, samples = recipe.size
    wavelets = _wavelets(recipe, samples)
    shaped = wavelets / np.sqrt((wavelets**2).sum(0)).mean()  # unit variance from unit variance
    signal, noise = np.empty(recipe.size, np.float32), np.empty(recipe.size, np.float32)

    def slab(first: int) -> None:
        lines = slice(first, min(first + _SLAB, inlines))
        signal[lines] = earth.reflectivity(lines) @ wavelets
        white = np.random.default_rng([recipe.seed, 2, first]).standard_normal((2, *signal[lines].shape), np.float32)
        noise[lines] = 0.8 * (white[0] @ shaped) + 0.6 * white[1]

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        list(threads.map(slab, range(0, inlines, _SLAB)))
    for axis in (0, 1):
        signal = _blur(signal, axis)
    signal *= _RMS / np.sqrt(np.mean(signal**2, dtype=np.float64))
    noise *= _RMS / recipe.signal_to_noise / np.sqrt(np.mean(noise**2, dtype=np.float64))
    signal += noise
    return signal


def _wavelets(recipe: Recipe, samples: int) -> np.ndarray:
    """The wavelet around every sample, [reflector, sample]: attenuation takes high frequencies with depth."""
    time = np.arange(samples) * recipe.interval / 1000
    peak = recipe.frequency * np.linspace(1.2, 0.8, samples)
    phase = (np.pi * peak[:, None] * (time[None] - time[:, None])) ** 2
    return ((1 - 2 * phase) * np.exp(-phase)).astype(np.float32)


def _blur(values: np.ndarray, axis: int) -> np.ndarray:
    """A light average over neighbouring traces: even a good image is no sharper than half a wavelength."""
    values = values.swapaxes(0, axis)
    out = np.float32(0.6) * values
    out[1:] += np.float32(0.2) * values[:-1]
    out[:-1] += np.float32(0.2) * values[1:]
    out[0] += np.float32(0.2) * values[0]
    out[-1] += np.float32(0.2) * values[-1]
    return out.swapaxes(0, axis)


def _table(frame: Frame, recipe: Recipe) -> tuple[segy_write.TraceTable, dict[str, Any]]:
    """Line numbers and projected coordinates of every trace on a rotated grid, and which are live and dead."""
    draw = np.random.default_rng([recipe.seed, 3])
    azimuth = float(np.round(draw.uniform(15, 40), 2))  # of increasing inline numbers, degrees east of north
    east, north = (float(np.round(v)) for v in (draw.uniform(4.2e5, 5.8e5), draw.uniform(6.60e6, 6.80e6)))
    turn = np.deg2rad(azimuth)
    i, x = np.meshgrid(np.arange(frame.inlines), np.arange(frame.crosslines), indexing="ij")
    live = _outline(frame, draw) if recipe.missing else np.ones(i.shape, bool)
    dead = np.zeros(i.shape, bool)
    places = np.argwhere(live)
    for n in draw.choice(len(places), min(recipe.dead, len(places) - 1), replace=False):
        dead[tuple(places[n])] = True
    table = segy_write.TraceTable(
        inline=1001 + i,
        crossline=2001 + x,
        x=east + frame.bin_size * (i * np.sin(turn) + x * np.cos(turn)),
        y=north + frame.bin_size * (i * np.cos(turn) - x * np.sin(turn)),
        live=live,
        dead=dead,
    )
    grid = {
        "first_inline": 1001,
        "first_crossline": 2001,
        "bin_m": frame.bin_size,
        "origin_m": [east, north],
        "inline_azimuth_deg": azimuth,
        "projection": "UTM-like, made up",
    }
    return table, grid


def _outline(frame: Frame, draw: np.random.Generator) -> np.ndarray:
    """Which traces an irregular survey with an obstruction has, bool (inlines, crosslines)."""
    a, b = np.meshgrid(np.linspace(-1, 1, frame.inlines), np.linspace(-1, 1, frame.crosslines), indexing="ij")
    angle = np.arctan2(b, a)
    reach = 1.02 + sum(draw.uniform(0.02, 0.07) * np.sin(k * angle + draw.uniform(0, 6.28)) for k in (2, 3, 5, 8))
    live = (np.abs(a) ** 5 + np.abs(b) ** 5) ** 0.2 < reach
    ca, cb = draw.uniform(-0.6, 0.6, 2)
    live &= (np.abs(a - ca) > 0.07) | (np.abs(b - cb) > 0.09)
    return live


def _text(recipe: Recipe, frame: Frame, grid: dict[str, Any]) -> list[str]:
    inlines, crosslines, samples = recipe.size
    last = _DELAY + frame.duration
    return [
        "CLIENT: NONE - SYNTHETIC SURVEY, NOT A MEASUREMENT",
        f"LINE: 3D POST-STACK TIME, SEED {recipe.seed}",
        "MADE BY: SFM SYNTH; KNOWN GEOLOGY IN THE FILE .GEOLOGY.JSON BESIDE THIS ONE",
        "",
        f"INLINES 1001-{1000 + inlines}, CROSSLINES 2001-{2000 + crosslines}, BOTH IN STEPS OF 1",
        f"BIN SIZE {frame.bin_size:g} X {frame.bin_size:g} M, INLINE AZIMUTH {grid['inline_azimuth_deg']:g} DEGREES",
        f"ORIGIN (FIRST INLINE, FIRST CROSSLINE): X {grid['origin_m'][0]:.2f} Y {grid['origin_m'][1]:.2f}",
        f"SAMPLES {samples}, INTERVAL {recipe.interval:g} MS, FROM {_DELAY} TO {last:g} MS TWO-WAY TIME",
        "DATA FORMAT: IEEE FLOAT32, BIG-ENDIAN",
        "",
        f"WAVELET: ZERO-PHASE RICKER, PEAK {recipe.frequency:g} HZ IN THE MIDDLE, LOWER WITH DEPTH",
        "POLARITY: AN INCREASE OF IMPEDANCE IS A POSITIVE AMPLITUDE",
        f"NOISE: BAND-LIMITED AND WHITE, SIGNAL TO NOISE {recipe.signal_to_noise:g} (RMS)",
        f"DEAD TRACES: {recipe.dead}; OUTLINE: {'IRREGULAR' if recipe.missing else 'FULL'}",
        "",
        "TRACE HEADER BYTES:",
        "  181-184 CDP X    185-188 CDP Y    71-72 COORDINATE SCALAR (-100)",
        "  189-192 INLINE   193-196 CROSSLINE",
        "  109-110 DELAY RECORDING TIME (MS)   29-30 TRACE IDENTIFICATION (2: DEAD)",
    ]
