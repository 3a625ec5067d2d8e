"""Builds samples: window, mask, voxels of one rank's slab. What every feed has in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sfm.model.masking import draw_mask
from sfm.spec import JobSpec
from sfm.survey.preflight import open_all, sampler_of
from sfm.survey.reader import WindowReader
from sfm.survey.sampler import Sample
from sfm.survey.statistics import Statistics

Columns = dict[str, np.ndarray]
"""A few windows: "voxels" [n, I, X, T] float32 (NaN without data), "visible" [n, V] and "masked" [n, M] int64."""


class SampleSource:
    """Reads any sample of a job by number. Opens the surveys when made; safe to use from several threads.

    Args:
        statistics: of each survey, in the order of the spec.
        rows: patch rows along inline of the slab to read; the whole window where none are given.
    """

    def __init__(self, spec: JobSpec, statistics: Sequence[dict[str, Any]], rows: range | None = None) -> None:
        self.spec = spec
        self.rows = rows if rows is not None else range(spec.grid[0])
        surveys = open_all(spec)
        budget = spec.resources.cache_mib * 2**20 // len(surveys)
        self.readers = [
            WindowReader(survey, Statistics.from_json(stats), cache_bytes=budget)
            for survey, stats in zip(surveys, statistics, strict=True)
        ]
        self.sampler = sampler_of(spec, surveys)

    def voxels(self, sample: Sample, rows: range | None = None) -> np.ndarray:
        """Normalised amplitudes of patch `rows` of a window, [I, X, T] float32, NaN without data."""
        rows = self.rows if rows is None else rows
        thickness = self.spec.model.patch[0]
        _, crosslines, samples = self.spec.window.shape
        origin = (sample.origin[0] + rows.start * thickness, *sample.origin[1:])
        return self.readers[sample.survey].read(origin, (len(rows) * thickness, crosslines, samples))

    def mask(self, index: int, rows: range | None = None, share: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Visible tokens of patch `rows` of sample `index`, and this share of the masked ones."""
        rows = self.rows if rows is None else rows
        return draw_mask(self.spec.grid, self.spec.mask_ratio, self.spec.seed, index, rows, share)

    def training(self, indices: Sequence[int]) -> Columns:
        """The training samples with these numbers; "masked" are the tokens to predict."""
        masks = [self.mask(index, share=self.spec.model.decode_share) for index in indices]
        return {
            "voxels": np.stack([self.voxels(self.sampler.train(index)) for index in indices]),
            "visible": np.stack([visible for visible, _ in masks]),
            "masked": np.stack([masked for _, masked in masks]),
        }
