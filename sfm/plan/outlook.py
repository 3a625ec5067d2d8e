"""What a job would take on a kind of GPU: memory, time and communication, predicted."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from sfm.plan.context import context_traffic, settle
from sfm.plan.engines import engine_traffic
from sfm.plan.fit import USABLE, changed
from sfm.plan.footprint import Memory, memory
from sfm.plan.machines import GPUS, GPUS_PER_MACHINE
from sfm.plan.shares import shares
from sfm.plan.size import flops
from sfm.spec import JobSpec, SpecError

EFFICIENCY = 0.45
"""Share of a GPU's dense peak that products and attention are assumed to reach together."""


class Forecast(NamedTuple):
    """A job on one kind of GPU. Seconds and bytes are of one optimiser step on the busiest device."""

    gpu: str
    memory: Memory
    room: float
    """Bytes of a device that the job may take."""
    compute_seconds: float
    """At EFFICIENCY of the peak of the job's precision."""
    context_bytes: int
    """Sent by attention between context ranks."""
    context_seconds: float
    engine_bytes: int
    """Sent for weights and gradients."""
    engine_seconds: float
    least_gpus: int | None
    """The fewest GPUs that can hold one sample at a time, shared by them all, attention by auto; None if none can."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.room


def forecast(spec: JobSpec, gpu: str) -> Forecast:
    """Predict `spec` on GPUs of this name, eight to a machine: groups that reach beyond a machine use its network."""
    spec, chip = settle(spec), GPUS[gpu]
    workers, context = spec.parallel.workers, spec.parallel.context
    peak = chip.bf16 if spec.precision == "bf16" else chip.fp32
    tokens = shares(spec).queries
    slowest = max(tokens) / sum(tokens)  # of each sample: ranks whose slab is a row thicker
    compute = spec.batch.size / spec.parallel.data * slowest * flops(spec).hardware / (peak * EFFICIENCY)
    one_machine = workers <= GPUS_PER_MACHINE
    between_ranks, of_engine = max(context_traffic(spec)), engine_traffic(spec)
    room = chip.memory * USABLE
    return Forecast(
        gpu,
        memory(spec),
        room,
        compute,
        between_ranks,
        between_ranks / (chip.link if one_machine or GPUS_PER_MACHINE % context == 0 else chip.network),
        of_engine,
        of_engine / (chip.link if one_machine else chip.network),
        least_devices(spec, room),
    )


def least_devices(spec: JobSpec, room: float) -> int | None:
    """The smallest context degree at which one sample at a time fits into `room` bytes a device."""
    for context in range(1, spec.grid[0] + 1):
        alone = {"workers": context, "context": context, "context_mode": "auto", "ulysses": 1}
        fields = [*((f"parallel.{name}", value) for name, value in alone.items()), ("batch.micro", 1)]
        with contextlib.suppress(SpecError):
            if memory(changed(spec, fields)).total <= room:
                return context
    return None
