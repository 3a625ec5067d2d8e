"""A made-up piece of earth: layers, folds, faults, an unconformity, a channel, salt; and its reflectivity.

Everything is in two-way time. A present-day voxel is traced back to the layer it was laid down in: through the
push of salt, along the faults, through the erosion, out of the folds. What is left is a depth in a log of
impedance, averaged over the sample interval exactly, so that dipping reflectors do not show stairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

FINE = 0.5
"""Milliseconds between entries of a log."""
_MARGIN = 400.0
"""Milliseconds that a log reaches beyond the survey on either side, for layers pushed in by folds and faults."""


@dataclass(frozen=True)
class Frame:
    """Size and spacing of the volume."""

    inlines: int
    crosslines: int
    samples: int
    interval: float
    """Milliseconds."""
    bin_size: float = 25.0
    """Metres between lines, both ways."""

    @property
    def duration(self) -> float:
        """Milliseconds from the first sample to the last."""
        return self.interval * (self.samples - 1)

    @property
    def extent(self) -> float:
        """Metres: the geometric mean of both sides."""
        return self.bin_size * float(np.sqrt(self.inlines * self.crosslines))

    def mesh(self) -> tuple[np.ndarray, np.ndarray]:
        """Metres along inline numbers and crossline numbers from the first bin, each (inlines, crosslines)."""
        i, x = np.meshgrid(np.arange(self.inlines), np.arange(self.crosslines), indexing="ij")
        return (i * self.bin_size).astype(np.float32), (x * self.bin_size).astype(np.float32)


@dataclass(frozen=True)
class Fault:
    """A normal fault: a gently curved plane whose throw dies out towards an elliptic tip line and grows with depth."""

    inline_m: float
    """Centre of the trace, metres from the first bin at half the duration."""
    crossline_m: float
    strike: float
    """Degrees from the direction of increasing inline numbers towards increasing crossline numbers."""
    dip: float
    """Degrees."""
    towards: int
    """+1 or -1: the side that moved down."""
    throw: float
    """Greatest throw, milliseconds."""
    half_length: float
    """Metres from the centre to where the throw is zero."""
    young: bool
    """Whether it offsets the unconformity, too; old faults are cut off by it."""
    bend: tuple[float, float, float]
    """Amplitude (metres), wavelength (metres) and phase of the trace's undulation."""


@dataclass(frozen=True)
class Salt:
    """A diapir: a domed top over a stem that narrows with depth."""

    inline_m: float
    crossline_m: float
    radius: float
    """Metres at its widest."""
    top: float
    """Milliseconds from the first sample."""
    base: float
    pull_up: float
    """Milliseconds by which what lies below comes early, at the centre."""


class Earth:
    """One drawn earth; :meth:`reflectivity` shows it inline by inline."""

    def __init__(self, frame: Frame, seed: int, salt: bool = False) -> None:
        self.frame = frame
        self._draw = np.random.default_rng([seed, 1])
        duration = frame.duration
        self.upper = self._logs(base=8.55, relief=0.12)
        self.lower = self._logs(base=8.80, relief=0.13)
        self.facies = np.clip(0.5 + 0.35 * self._surface(0.35), 0, 1)
        self.dip = self._plane(0.09 * duration)
        self.drape = self._surface(0.45) * 0.012 * duration
        self.fold = self._folds()
        self.unconformity = self._unconformity()
        self.faults = self._faults()
        self.salt = self._salt() if salt else None
        self._channel()

    # What is drawn, once -------------------------------------------------------------------------------------------

    def _surface(self, scale: float) -> np.ndarray:
        """A smooth random surface of zero mean and unit variance; `scale` is its correlation length over the extent."""
        frame = self.frame
        length = scale * frame.extent / frame.bin_size
        shape = tuple(int(n + 4 * length) for n in (frame.inlines, frame.crosslines))  # no wrap-around seen
        k = np.add.outer(np.fft.fftfreq(shape[0]) ** 2, np.fft.rfftfreq(shape[1]) ** 2)
        noise = np.fft.rfft2(self._draw.standard_normal(shape)) * np.exp(-0.5 * (np.pi * length) ** 2 * k)
        surface = np.fft.irfft2(noise, shape)[: frame.inlines, : frame.crosslines]
        return ((surface - surface.mean()) / (surface.std() or 1)).astype(np.float32)

    def _plane(self, rise: float) -> np.ndarray:
        """A regional dip that changes by about `rise` across the survey."""
        i, x = self.frame.mesh()
        angle = self._draw.uniform(0, 2 * np.pi)
        plane = np.cos(angle) * i + np.sin(angle) * x
        return ((plane - plane.mean()) / self.frame.extent * rise).astype(np.float32)

    def _logs(self, base: float, relief: float) -> np.ndarray:
        """Integrated log impedance of two related wells, [2, n] float64: blocky beds with fine layering on a trend."""
        draw = self._draw
        count = int((self.frame.duration + 2 * _MARGIN) / FINE)
        thickness = np.maximum(draw.lognormal(np.log(16), 0.75, count // 8), 3.0)  # of beds, ms
        edges = np.cumsum(thickness)
        bed = np.searchsorted(edges, np.arange(count) * FINE)
        beds = int(bed.max()) + 1
        # Cycles of shale, silt, sand and now and then a hard limestone or a soft coal that makes a marker.
        kind = draw.choice(5, beds, p=[0.40, 0.24, 0.24, 0.07, 0.05])
        level = np.array([-0.5, 0.0, 0.55, 1.9, -2.0])[kind] * relief
        wander = np.convolve(draw.standard_normal(beds + 8), np.ones(8) / 8, "valid")[:beds] * relief
        wells = []
        for _ in range(2):
            value = (
                level * (1 + 0.25 * draw.standard_normal(beds)) + wander + 0.35 * relief * draw.standard_normal(beds)
            )
            fine = np.convolve(draw.standard_normal(count + 5), np.ones(6) / 6, "valid")[:count]
            trend = base + 2.2e-4 * np.arange(count) * FINE
            wells.append(np.cumsum(value[bed] + 0.25 * relief * fine + trend) * FINE)
        return np.stack(wells)

    def _folds(self) -> np.ndarray:
        """Uplift of the lower sequence, milliseconds: an elongate anticline or two, and broad warps."""
        frame, draw = self.frame, self._draw
        i, x = frame.mesh()
        uplift = 0.035 * frame.duration * self._surface(0.30)
        angle = draw.uniform(0, np.pi)
        for _ in range(2):
            ci, cx = draw.uniform(0.15, 0.85) * i.max(), draw.uniform(0.15, 0.85) * x.max()
            along = np.cos(angle) * (i - ci) + np.sin(angle) * (x - cx)
            across = -np.sin(angle) * (i - ci) + np.cos(angle) * (x - cx)
            size = draw.uniform(0.06, 0.12) * frame.duration
            shape = (along / (0.45 * frame.extent)) ** 2 + (across / (draw.uniform(0.14, 0.24) * frame.extent)) ** 2
            uplift = uplift + size * np.exp(-shape)
            angle += draw.normal(0, 0.15)  # folds of one phase are nearly parallel
        return (uplift + self._plane(0.22 * frame.duration)).astype(np.float32)

    def _unconformity(self) -> np.ndarray:
        """Time of the erosion surface, milliseconds: tilted, with valleys, lower relief than what it cuts."""
        frame = self.frame
        level = self._draw.uniform(0.36, 0.46) * frame.duration
        return (level + self._plane(0.05 * frame.duration) + 0.014 * frame.duration * self._surface(0.16)).astype(
            np.float32
        )

    def _faults(self) -> list[Fault]:
        """A set of sub-parallel normal faults, some dipping the other way, longer ones with more throw."""
        frame, draw = self.frame, self._draw
        strike = draw.uniform(0, 180)
        along = np.deg2rad(strike)
        count = int(draw.integers(5, 8))
        faults = []
        for n in range(count):
            across = ((n + draw.uniform(0.25, 0.75)) / count - 0.5) * 1.15 * frame.extent
            shift = draw.uniform(-0.3, 0.3) * frame.extent
            half = draw.uniform(0.28, 0.75) * frame.extent
            faults.append(
                Fault(
                    inline_m=frame.bin_size * (frame.inlines - 1) / 2 - np.sin(along) * across + np.cos(along) * shift,
                    crossline_m=frame.bin_size * (frame.crosslines - 1) / 2
                    + np.cos(along) * across
                    + np.sin(along) * shift,
                    strike=strike + draw.normal(0, 8),
                    dip=draw.uniform(50, 68),
                    towards=1 if draw.random() < 0.72 else -1,
                    throw=0.085 * frame.duration * half / (0.75 * frame.extent) * draw.uniform(0.7, 1.2),
                    half_length=half,
                    young=n in (1, count - 2),
                    bend=(
                        draw.uniform(0.01, 0.03) * frame.extent,
                        draw.uniform(0.4, 0.9) * frame.extent,
                        draw.uniform(0, 6.28),
                    ),
                )
            )
        return faults

    def _salt(self) -> Salt:
        frame, draw = self.frame, self._draw
        return Salt(
            inline_m=draw.uniform(0.35, 0.65) * frame.bin_size * frame.inlines,
            crossline_m=draw.uniform(0.35, 0.65) * frame.bin_size * frame.crosslines,
            radius=draw.uniform(0.17, 0.22) * frame.extent,
            top=draw.uniform(0.30, 0.36) * frame.duration,
            base=draw.uniform(0.82, 0.86) * frame.duration,
            pull_up=draw.uniform(0.035, 0.05) * frame.duration,
        )

    def _channel(self) -> None:
        """A meandering channel (Langbein & Leopold's sine-generated curve), cut into the upper sequence and filled."""
        frame, draw = self.frame, self._draw
        i, x = frame.mesh()
        wavelength = draw.uniform(0.30, 0.42) * frame.extent
        step = frame.bin_size / 2
        path = np.arange(-1.2 * frame.extent, 4 * frame.extent, step)
        phase = 2 * np.pi * path / wavelength + draw.uniform(0, 6.28)
        swing = 1.25 + 0.25 * np.sin(2 * np.pi * path / (2.7 * wavelength) + draw.uniform(0, 6.28))
        heading = swing * np.sin(phase) + draw.uniform(-0.25, 0.25)
        self.azimuth = float(draw.choice([0, 90]) + draw.uniform(-20, 20))
        turn = np.deg2rad(self.azimuth)
        run, side = np.cumsum(np.cos(heading)) * step, np.cumsum(np.sin(heading)) * step
        middle = np.searchsorted(run, run[-1] / 2)
        run, side = run - run[middle], side - side[middle] + draw.uniform(-0.1, 0.1) * frame.extent
        centre_i = i.max() / 2 + np.cos(turn) * run - np.sin(turn) * side
        centre_x = x.max() / 2 + np.sin(turn) * run + np.cos(turn) * side
        reach = 0.1 * frame.extent
        inside = (centre_i > -reach) & (centre_i < i.max() + reach) & (centre_x > -reach) & (centre_x < x.max() + reach)
        self.channel_line = np.stack([centre_i[inside], centre_x[inside]], axis=1)
        self.channel_width = float(draw.uniform(0.045, 0.06) * frame.extent)
        self.channel_depth = float(np.clip(0.03 * frame.duration, 16, 34))
        nearest = np.full(i.shape, np.inf, np.float32)
        for ci, cx in self.channel_line:
            np.minimum(nearest, (i - np.float32(ci)) ** 2 + (x - np.float32(cx)) ** 2, out=nearest)
        profile = 1 - 4 * nearest / self.channel_width**2
        self.channel_floor = self.channel_depth * np.sqrt(np.maximum(profile, 0))  # thickness, ms
        # Where the surface that it cut lies: well above the unconformity everywhere.
        room = float((self.unconformity - self.dip - self.drape).min())
        self.channel_level = float(draw.uniform(0.5, 0.62)) * room
        self.channel_contrast = 0.24 * float(draw.choice([-1, 1]))

    # What it looks like --------------------------------------------------------------------------------------------

    def reflectivity(self, lines: slice) -> np.ndarray:
        """Reflection coefficients of some inlines, [i, crosslines, samples] float32."""
        frame = self.frame
        # samples + 2 edges make samples + 1 intervals, and those the interfaces at the samples.
        edges = np.arange(-1, frame.samples + 1, dtype=np.float32) * np.float32(frame.interval)
        t = np.broadcast_to(edges, (lines.stop - lines.start, frame.crosslines, frame.samples + 2))
        t = self._undo_salt(t, lines)
        for fault in self.faults:
            if fault.young:
                t = self._undo_fault(t, fault, lines)
        surface = self.unconformity[lines, :, None]
        u = t - self.dip[lines, :, None] - self.drape[lines, :, None] * (t / frame.duration)
        impedance = self._average(self.upper, u, lines)
        self._fill_channel(impedance, u, lines)

        older = t
        for fault in self.faults:
            if not fault.young:
                older = self._undo_fault(older, fault, lines)
        # Growth: folding went on while layers were laid down, so that it fades upwards.
        s = older + self.fold[lines, :, None] * (0.55 + 0.45 * older / frame.duration)
        middle = (t[..., 1:] + t[..., :-1]) / 2
        above = np.clip((surface - middle) / frame.interval + 0.5, 0, 1)
        impedance = above * impedance + (1 - above) * self._average(self.lower, s, lines)
        if self.salt:
            self._intrude(impedance, self.salt, lines)
        return np.diff(impedance, axis=-1) / 2

    def _average(self, logs: np.ndarray, t: np.ndarray, lines: slice) -> np.ndarray:
        """Mean log impedance between neighbouring edges `t`, blended between the two wells."""
        place = np.clip((t + _MARGIN) / FINE, 0, logs.shape[1] - 2)
        index = place.astype(np.int32)
        part = place - index
        blend = self.facies[lines, :, None]
        span = np.diff(place, axis=-1)
        np.maximum(span, 1e-3, out=span)
        wells = []
        for well in logs:
            # float64: the difference of two large sums
            total = well[index] + part * (well[index + 1] - well[index])
            wells.append((np.diff(total, axis=-1) / (span * FINE)).astype(np.float32))
        return wells[0] + blend * (wells[1] - wells[0])

    def _undo_fault(self, t: np.ndarray, fault: Fault, lines: slice) -> np.ndarray:
        """Move the hanging wall back up."""
        frame = self.frame
        i, x = (m[lines] for m in frame.mesh())
        strike = np.deg2rad(fault.strike)
        along = np.cos(strike) * (i - fault.inline_m) + np.sin(strike) * (x - fault.crossline_m)
        across = fault.towards * (-np.sin(strike) * (i - fault.inline_m) + np.cos(strike) * (x - fault.crossline_m))
        amplitude, wavelength, phase = fault.bend
        across = across + amplitude * np.sin(2 * np.pi * along / wavelength + phase)
        taper = np.maximum(1 - (along / fault.half_length) ** 2, 0) ** 1.5
        if not taper.any():
            return t
        depth = t / frame.duration
        # 1.3 m per ms of two-way time (2600 m/s); dips flatten a little with depth, as listric faults do.
        heave = 1.3 / np.tan(np.deg2rad(fault.dip)) * (t - frame.duration / 2) * (1 + 0.25 * depth)
        distance = across[..., None] - heave
        growth = np.clip(1.35 * depth if fault.young else 0.45 + 0.75 * depth, 0, 1.15)
        drag = np.exp(np.minimum(-distance, 0) / (0.30 * frame.extent))  # reverse drag: the throw dies out away from it
        throw = fault.throw * taper[..., None] * growth * drag
        return t - np.where(distance > 0, throw, 0).astype(np.float32)

    def _fill_channel(self, impedance: np.ndarray, u: np.ndarray, lines: slice) -> None:
        frame = self.frame
        middle = (u[..., 1:] + u[..., :-1]) / 2 - self.channel_level
        floor = self.channel_floor[lines, :, None]
        cover = np.clip(middle / frame.interval + 0.5, 0, 1) * np.clip((floor - middle) / frame.interval + 0.5, 0, 1)
        cover *= floor > 0
        # Fining upwards: the sand at the base stands out most.
        fill = self.channel_contrast * (0.45 + 0.55 * np.clip(middle / self.channel_depth, 0, 1))
        base = 8.55 + 2.2e-4 * (self.channel_level + _MARGIN)
        impedance += cover * (base + fill - impedance)

    def _salt_shape(self, lines: slice) -> tuple[np.ndarray, np.ndarray]:
        """(distance from the axis in metres, local radius factor), each [i, crosslines]."""
        assert self.salt is not None
        i, x = (m[lines] for m in self.frame.mesh())
        away_i, away_x = i - self.salt.inline_m, x - self.salt.crossline_m
        angle = np.arctan2(away_x, away_i)
        ragged = 1 + 0.10 * np.sin(2 * angle + 0.7) + 0.05 * np.sin(3 * angle + 2.1) + 0.03 * np.sin(5 * angle)
        return np.hypot(away_i, away_x), ragged

    def _undo_salt(self, t: np.ndarray, lines: slice) -> np.ndarray:
        """Layers were dragged up beside the salt, and what lies below it comes early."""
        salt = self.salt
        if salt is None:
            return t
        distance, ragged = self._salt_shape(lines)
        reach = distance / (salt.radius * ragged)
        rise = np.clip(t / salt.top, 0, 1) ** 2 * np.clip((salt.base - t) / (0.3 * salt.base), 0, 1)
        uplift = 0.10 * self.frame.duration * np.exp(-((reach[..., None] / 1.35) ** 2)) * rise
        below = 1 / (1 + np.exp(np.clip((salt.base - 6 - t) / 4, -30, 30)))
        pull = salt.pull_up * np.exp(-((reach[..., None] / 0.85) ** 4)) * below
        return (t + uplift + pull).astype(np.float32)

    def _intrude(self, impedance: np.ndarray, salt: Salt, lines: slice) -> None:
        frame = self.frame
        distance, ragged = self._salt_shape(lines)
        t = (np.arange(frame.samples + 1, dtype=np.float32) - 0.5) * np.float32(frame.interval)
        down = np.clip((t - salt.top) / (salt.base - salt.top), 0, 1)
        dome = np.sqrt(np.clip(1 - np.clip(1 - down / 0.35, 0, 1) ** 2, 0, 1))
        stem = 1 - 0.45 * np.clip((down - 0.3) / 0.5, 0, 1) ** 1.5
        radius = salt.radius * dome * stem * (t >= salt.top) * (t <= salt.base)
        inside = np.clip((radius * ragged[..., None] - distance[..., None]) / frame.bin_size + 0.5, 0, 1)
        inside *= (t >= salt.top) & (t <= salt.base)
        # Faint and without order: halite is nearly homogeneous, with rafts and inclusions.
        texture = np.random.default_rng([int(salt.radius), lines.start]).standard_normal(impedance.shape, np.float32)
        impedance += inside * (9.32 + 0.012 * texture - impedance)

    def describe(self) -> dict[str, Any]:
        """What is where, as plain data: milliseconds from the first sample, metres from the first bin."""
        keep = max(1, max(self.unconformity.shape) // 32)
        markers = {}
        for name, logs in (("upper", self.upper), ("lower", self.lower)):
            impedance = np.diff(logs[0]) / FINE
            step = np.abs(np.diff(impedance))
            strongest = np.sort(np.argsort(step)[-8:])
            markers[name] = [
                {
                    "time_ms": round(float(n * FINE - _MARGIN), 1),
                    "reflection": round(float(np.diff(impedance)[n]) / 2, 4),
                }
                for n in strongest
            ]
        return {
            "unconformity": {
                "every_nth_line": keep,
                "time_ms": np.round(self.unconformity[::keep, ::keep].astype(float), 1).tolist(),
            },
            "markers_before_deformation": markers,
            "fold_uplift_ms": {"least": round(float(self.fold.min()), 1), "most": round(float(self.fold.max()), 1)},
            "faults": [
                {
                    "kind": "normal",
                    "cuts_unconformity": f.young,
                    "centre_m": [round(f.inline_m, 1), round(f.crossline_m, 1)],
                    "strike_deg": round(f.strike % 180, 1),
                    "dip_deg": round(f.dip, 1),
                    "down_towards": f.towards,
                    "throw_ms": round(f.throw, 1),
                    "throw_m": round(f.throw * 1.3, 1),
                    "length_m": round(2 * f.half_length, 1),
                }
                for f in self.faults
            ],
            "channel": {
                "azimuth_deg": round(self.azimuth, 1),
                "width_m": round(self.channel_width, 1),
                "depth_ms": round(self.channel_depth, 1),
                "fill": "harder than its banks" if self.channel_contrast > 0 else "softer than its banks",
                "level_ms": round(self.channel_level, 1),
                "centre_line_m": np.round(self.channel_line[::4], 1).tolist(),
            },
            "salt": None if self.salt is None else {k: round(v, 1) for k, v in vars(self.salt).items()},
        }
