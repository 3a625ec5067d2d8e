"""Closed formulas over a job spec: parameters, operations, memory, communication, resources. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from sfm.plan.context import context_traffic, settle
from sfm.plan.engines import engine_traffic
from sfm.plan.fit import check
from sfm.plan.footprint import Memory, memory
from sfm.plan.outlook import Forecast, forecast
from sfm.plan.size import Flops, flops, parameters
from sfm.spec import JobSpec

__all__ = [
    "Flops",
    "Forecast",
    "Memory",
    "Request",
    "check",
    "context_traffic",
    "engine_traffic",
    "flops",
    "forecast",
    "memory",
    "parameters",
    "request",
    "settle",
]


@dataclass(frozen=True)
class Request:
    """What a job takes from a cluster while it runs. Counted in Ray's logical resources."""

    workers: int
    cpus: float
    gpus: int


def request(spec: JobSpec) -> Request:
    """Resources that all workers of a job (and their readers) hold together."""
    workers = spec.parallel.workers
    per_worker = spec.resources.cpus_per_worker + (spec.resources.reader_cpus if spec.feed == "ray" else 0)
    return Request(workers, workers * per_worker, workers if spec.resources.device == "gpu" else 0)
