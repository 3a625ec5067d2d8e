"""Who may start: a pure function of the queue, what runs and what the cluster has.

Rules: higher priority first, then first come; a job gets all it asks for at once or nothing; nobody overtakes
a job that waits for running jobs to end, so that a large job is never starved by small ones. A job that
is larger than the whole cluster waits for nodes and holds nobody up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sfm.plan import Request

SLACK = 1e-6
"""Logical CPUs below which two sums of fractions count as equal."""


@dataclass(frozen=True)
class Capacity:
    """What a cluster has in all. Counted in Ray's logical resources."""

    cpus: float
    gpus: float
    models: Mapping[str, float] | None = None
    """GPUs of each model, as H200; None where others may join, so that nothing is known."""

    def holds(self, cpus: float, gpus: float) -> bool:
        return cpus <= self.cpus + SLACK and gpus <= self.gpus + SLACK


@dataclass(frozen=True)
class Waiting:
    """A queued job."""

    id: str
    priority: int
    number: int
    """Order of arrival."""
    request: Request


@dataclass(frozen=True)
class Decision:
    """Jobs to start now, in order; and for every other queued job the sentence why it waits."""

    admitted: tuple[str, ...]
    reasons: dict[str, str]


def schedule(queue: Iterable[Waiting], running: Sequence[Request], capacity: Capacity) -> Decision:
    """Decide which queued jobs start beside the `running` ones on a cluster of `capacity`."""
    cpus = sum(r.cpus for r in running)
    gpus = sum(r.gpus for r in running)
    admitted: list[str] = []
    reasons: dict[str, str] = {}
    ahead: str | None = None
    for job in sorted(queue, key=lambda j: (-j.priority, j.number)):
        need = job.request
        if not capacity.holds(need.cpus, need.gpus):
            reasons[job.id] = (
                f"needs {_amount(need)}, but the whole cluster has {_amount(capacity)}; waits for nodes to join"
            )
        elif ahead is not None:
            reasons[job.id] = f"waits behind job {ahead}, which is ahead in the queue and waits for room"
        elif not capacity.holds(cpus + need.cpus, gpus + need.gpus):
            free = Capacity(max(0.0, capacity.cpus - cpus), max(0.0, capacity.gpus - gpus))
            reasons[job.id] = f"needs {_amount(need)}, but {_amount(free)} are free now; waits for running jobs to end"
            ahead = job.id
        else:
            admitted.append(job.id)
            cpus, gpus = cpus + need.cpus, gpus + need.gpus
    return Decision(tuple(admitted), reasons)


def _amount(of: Request | Capacity) -> str:
    return f"{of.cpus:g} CPUs" + (f" and {of.gpus:g} GPUs" if of.gpus or isinstance(of, Capacity) else "")


def too_large(request: Request, capacity: Capacity, gpu: str | None = None) -> str | None:
    """The sentence that refuses a job larger than the whole cluster; None if it fits.

    Args:
        gpu: the model of GPU that the job asks for, if it asks for one.
    """
    if capacity.holds(request.cpus, request.gpus):
        return _too_few(request, capacity.models, gpu)
    most = request.workers
    if request.gpus:
        most = min(most, int(capacity.gpus))
    if request.cpus:
        most = min(most, int((capacity.cpus + SLACK) * request.workers / request.cpus))
    advice = f"take at most {most}" if most else "add nodes to the cluster"
    return (
        f"parallel.workers {request.workers} need {_amount(request)} in all, "
        f"but the whole cluster has {_amount(capacity)}; {advice}"
    )


def _too_few(request: Request, models: Mapping[str, float] | None, gpu: str | None) -> str | None:
    """The sentence that refuses a job for more GPUs of a model than there are; None if there are enough."""
    if gpu is None or models is None or request.gpus <= models.get(gpu, 0):
        return None
    there = (
        ", ".join(f"{count:g} {model}" for model, count in sorted(models.items())) or "none of a model that Ray knows"
    )
    most = f"take at most {models[gpu]:g}, " if models.get(gpu) else ""
    return (
        f"resources.gpu {gpu}: parallel.workers {request.workers} need {request.gpus} of these, but of GPUs the whole "
        f"cluster has {there}; {most}ask for others, or add nodes"
    )
