"""Which samples a data-parallel rank computes, as a pure function of the step.

The samples of step s are s * B ... (s + 1) * B - 1, whatever the number of workers. A rank's share is
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

    @classmethod
    def of(cls, spec: JobSpec, data_rank: int) -> RankOrder:
        return cls(spec.batch.size, spec.parallel.data, data_rank)

    @property
    def per_step(self) -> int:
        """Samples of this rank in one step."""
        return self.batch // self.data

    def sample(self, position: int) -> int:
        """Global number of the sample at `position` of this rank's sequence."""
        step, within = divmod(position, self.per_step)
        return step * self.batch + self.rank * self.per_step + within
