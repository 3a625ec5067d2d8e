"""Health: `/healthz` (the process answers) and `/readyz` (it can do its work)."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from sqlalchemy.exc import SQLAlchemyError

from service.api.context import Context, Shared
from service.api.problems import Problem, documented

router = APIRouter(tags=["health"])

STALE_SECONDS = 60.0
"""Age of the last pass beyond which the reconciler counts as stuck. A pass may wait 30 s for Ray."""


class Health(BaseModel):
    """The process answers."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ok"}]})

    status: str = "ok"


class Readiness(BaseModel):
    """Each check: "ok", or the sentence of what is wrong."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"database": "ok", "reconciler": "ok", "ray": "ok"}]})

    database: str
    reconciler: str
    ray: str


@router.get(
    "/healthz",
    summary="Is the process alive?",
)
async def healthz() -> Health:
    """Answers as long as the process does. Needs no token."""
    return Health()


@router.get(
    "/readyz",
    summary="Can it do its work?",
    responses=documented(not_ready=(503, "ray: Ray at http://127.0.0.1:8265 does not answer: connection refused")),
)
async def readyz(context: Shared) -> Readiness:
    """The database answers, the reconciler passed lately, Ray can be reached. Needs no token."""
    checks = Readiness(
        database=await _database(context), reconciler=_reconciler(context), ray=context.reconciler.trouble or "ok"
    )
    wrong = [f"{name}: {sentence}" for name, sentence in checks if sentence != "ok"]
    if wrong:
        raise Problem(503, "not_ready", "\n".join(wrong), checks=checks.model_dump())
    return checks


async def _database(context: Context) -> str:
    try:
        await asyncio.to_thread(context.store.ping)
    except SQLAlchemyError as error:
        return f"does not answer: {str(error).splitlines()[0]}"
    return "ok"


def _reconciler(context: Context) -> str:
    passed_at = context.reconciler.passed_at
    if passed_at is None:
        return "has not passed yet"
    age = time.monotonic() - passed_at
    return "ok" if age < STALE_SECONDS else f"its last pass was {age:.0f} s ago"
