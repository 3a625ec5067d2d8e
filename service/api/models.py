"""What the API answers with."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from service.jobs.lifecycle import State
from service.jobs.store import Job

SPEC = {
    "name": "basin",
    "surveys": [{"url": "s3://surveys/basin.mdio"}],
    "window": {"shape": [64, 64, 128]},
    "model": {"preset": "tiny", "patch": [8, 8, 16]},
    "parallel": {"workers": 2, "engine": "zero2"},
    "batch": {"size": 8},
    "steps": 2000,
}
"""The spec of the examples. (FastAPI drops null values from examples, so these have none.)"""

SUMMARY: dict[str, Any] = {
    "id": "3f2a9c51e07b",
    "name": "basin",
    "state": "FAILED",
    "reason": "survey s3://surveys/basin.mdio, chunk 3: no such object",
    "created_at": "2026-03-01T09:00:00Z",
    "submitted_at": "2026-03-01T09:00:01Z",
    "started_at": "2026-03-01T09:00:04Z",
    "finished_at": "2026-03-01T09:07:12Z",
    "submission_id": "sfm-3f2a9c51e07b",
    "output": "s3://models/runs/3f2a9c51e07b",
}
METRIC: dict[str, Any] = {
    "step": 120,
    "loss": 0.81,
    "grad_norm": 0.4,
    "lr": 0.0005,
    "tokens_per_s": 51200.0,
    "data_wait_share": 0.01,
    "step_seconds": 0.16,
    "time": 1772355700.0,
}


class JobSummary(BaseModel):
    """A job in a list."""

    model_config = ConfigDict(json_schema_extra={"examples": [SUMMARY]})

    id: str = Field(description="12 hexadecimal digits.")
    name: str
    state: State
    reason: str | None = Field(description="Why the job waits, failed or was cancelled; one sentence per line.")
    created_at: datetime
    submitted_at: datetime | None = Field(description="When it was given room on the cluster.")
    started_at: datetime | None = Field(description="When its driver was first seen running.")
    finished_at: datetime | None
    submission_id: str = Field(description="Its name in Ray.")
    output: str = Field(description="URL under which it leaves checkpoints, metrics and pictures.")

    @classmethod
    def of(cls, job: Job) -> JobSummary:
        return cls(**_fields(job))


class JobDetail(JobSummary):
    """A job in full."""

    model_config = ConfigDict(json_schema_extra={"examples": [SUMMARY | {"spec": SPEC, "metrics": METRIC}]})

    spec: dict[str, Any] = Field(description="The job spec, every field written out.")
    metrics: dict[str, Any] | None = Field(description="The newest metrics record; null before the first step.")

    @classmethod
    def of_job(cls, job: Job, metrics: dict[str, Any] | None) -> JobDetail:
        return cls(**_fields(job), spec=json.loads(job.spec_json), metrics=metrics)


class JobPage(BaseModel):
    """A page of jobs, newest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"jobs": [SUMMARY], "next_cursor": "41"}]})

    jobs: list[JobSummary]
    next_cursor: str | None = Field(description="Send it as `cursor` for the next page; null on the last.")


def _fields(job: Job) -> dict[str, Any]:
    names = ("id", "name", "state", "reason", "submission_id", "output")
    times = ("created_at", "submitted_at", "started_at", "finished_at")
    return {n: getattr(job, n) for n in names} | {t: _time(getattr(job, t)) for t in times}


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
