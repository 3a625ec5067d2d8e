"""Which samples a data-parallel rank computes, as a pure function of the step.

The samples of a step are `batch` consecutive numbers, whatever the number of workers. A rank's share is
contiguous, so the position in its own sequence determines the sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from sfm.spec import JobSpec


@dataclass(frozen=True)
class RankOrder:
    """The sequence of samples of one data-parallel rank."""

    batch: int
    """Global batch: samples per step."""
    data: int
    """Data-parallel degree."""
    rank: int
    """Data-parallel rank."""
    first: int = 0
    """Number of the first sample: those before were consumed by earlier steps, which may have had another batch."""

    @classmethod
    def of(cls, spec: JobSpec, data_rank: int, first: int = 0) -> RankOrder:
        return cls(spec.batch.size, spec.parallel.data, data_rank, first)

    @property
    def per_step(self) -> int:
        """Samples of this rank in one step."""
        return self.batch // self.data

    def sample(self, position: int) -> int:
        """Global number of the sample at `position` of this rank's sequence."""
        step, within = divmod(position, self.per_step)
        return self.first + step * self.batch + self.rank * self.per_step + within
