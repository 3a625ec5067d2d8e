"""Builds samples: window, mask, voxels of one rank's slab. What every feed has in common."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from sfm.model.masking import draw_mask
from sfm.spec import JobSpec
from sfm.survey.cache import DiskCache
from sfm.survey.meter import Reading
from sfm.survey.preflight import open_all, sampler_of
from sfm.survey.reader import WindowReader
from sfm.survey.sampler import Sample
from sfm.survey.scaling import storage_type
from sfm.survey.statistics import Statistics
from sfm.survey.transfers import Transfers

Columns = dict[str, np.ndarray]
"""A few windows: "voxels" [n, I, X, T] of `window.dtype` (NaN without data), "visible" [n, V] and "masked" [n, M]
int64; and "reading" [n, fields of Reading] float64, whose sum is what reading them cost."""

_SIDE_BY_SIDE = 8  # windows of one batch that are read at a time


class SampleSource:
    """Reads any sample of a job by number. Opens the surveys when made; safe to use from several threads.

    Args:
        statistics: of each survey, in the order of the spec.
        rows: patch rows along inline of the slab to read; the whole window where none are given.
    """

    def __init__(self, spec: JobSpec, statistics: Sequence[dict[str, Any]], rows: range | None = None) -> None:
        self.spec = spec
        self.rows = rows if rows is not None else range(spec.grid[0])
        self.type = storage_type(spec.window.dtype)
        surveys = open_all(spec, self._slab(self.rows))
        resources = spec.resources
        disk = DiskCache(resources.disk_cache, int(resources.disk_cache_gib * 2**30)) if resources.disk_cache else None
        self.transfers = Transfers(resources.transfer_mib * 2**20, resources.decoders, resources.requests, disk=disk)
        self.readers = [
            WindowReader(
                survey,
                Statistics.from_json(stats),
                self.transfers,
                cache_bytes=resources.cache_mib * 2**20 // len(surveys),
                kind=spec.window.dtype,
                pad=spec.window.pad,
            )
            for survey, stats in zip(surveys, statistics, strict=True)
        ]
        self.sampler = sampler_of(spec, surveys)
        self._windows = ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="windows")
        self._told = Reading()
        self._telling = threading.Lock()

    def voxels(self, sample: Sample, rows: range | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """Normalised amplitudes of patch `rows` of a window, [I, X, T] of `window.dtype`, NaN without data.

        Args:
            out: where to write them; default: a new array.
        """
        rows = self.rows if rows is None else rows
        first, *across = sample.origin
        origin = (first + rows.start * self.spec.model.patch[0], across[0], across[1])
        return self.readers[sample.survey].read(origin, self._slab(rows), out)

    def mask(self, index: int, rows: range | None = None, share: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Visible tokens of patch `rows` of sample `index`, and this share of the masked ones."""
        rows = self.rows if rows is None else rows
        return draw_mask(self.spec.grid, self.spec.mask_ratio, self.spec.seed, index, rows, share)

    def training(self, indices: Sequence[int]) -> Columns:
        """The training samples with these numbers; "masked" are the tokens to predict."""
        voxels = np.empty((len(indices), *self._slab(self.rows)), self.type)
        samples = [self.sampler.train(index) for index in indices]
        list(self._windows.map(lambda n: self.voxels(samples[n], out=voxels[n]), range(len(indices))))
        masks = [self.mask(index, share=self.spec.model.decode_share) for index in indices]
        return {
            "voxels": voxels,
            "visible": np.stack([visible for visible, _ in masks]),
            "masked": np.stack([masked for _, masked in masks]),
            "reading": self._cost(len(indices)),
        }

    def close(self) -> None:
        """End the threads."""
        self._windows.shutdown()
        self.transfers.close()

    def _slab(self, rows: range) -> tuple[int, int, int]:
        """Shape of patch `rows` of a window."""
        _, crosslines, samples = self.spec.window.shape
        return len(rows) * self.spec.model.patch[0], crosslines, samples

    def _cost(self, rows: int) -> np.ndarray:
        """What reading has cost since the last call, in the first of `rows` rows."""
        with self._telling:
            now = self.transfers.meter.now()
            spent, self._told = now.minus(self._told), now
        return np.array([spent.to_row()] + [Reading().to_row()] * (rows - 1))
