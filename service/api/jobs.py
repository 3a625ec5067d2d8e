"""The resource `jobs`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from service.api.bodies import read_spec
from service.api.context import Context, Shared
from service.api.models import METRIC, SPEC, JobDetail, JobPage, JobSummary
from service.api.problems import Problem, documented
from service.failpoints import failpoint
from service.jobs import preflight
from service.jobs.lifecycle import CANCELLED_BY_USER, FINISHED, State
from service.jobs.outputs import ARTIFACTS, Output
from service.jobs.scheduler import Capacity, too_large
from service.jobs.store import Job, KeyTaken, new_id
from sfm import plan
from sfm.spec import JobSpec, SfmError, absolute, dump_spec, parse_spec

T = TypeVar("T")

router = APIRouter(prefix="/jobs", tags=["jobs"])

NOT_FOUND = documented(no_such_job=(404, "there is no job 3f2a9c51e07b; GET /jobs lists all"))
UNREADABLE = documented(output_unreadable=(502, "output s3://models/runs/3f2a9c51e07b cannot be read: AccessDenied"))
_SPEC_SCHEMA = {"$ref": "#/components/schemas/JobSpec"}
_JSON_EXAMPLES = {"tiny": {"summary": "A tiny model on two workers", "value": SPEC}}
_SUBMITTED: dict[int | str, dict[str, Any]] = {
    200: {"model": JobDetail, "description": "This idempotency key was used for the same spec before: that job."},
    201: {"headers": {"Location": {"description": "Path of the job.", "schema": {"type": "string"}}}},
}
_YAML_EXAMPLES = {"tiny": {"summary": "The same as YAML", "value": dump_spec(parse_spec(SPEC))}}


@router.post(
    "",
    status_code=201,
    summary="Submit a job",
    response_description="The job was accepted; it is started when the cluster has room for all of it.",
    responses=_SUBMITTED
    | documented(
        too_large=(413, "a job spec holds at most 262144 bytes"),
        unsupported_media_type=(415, "a job spec is sent as application/json or application/yaml, not text/plain"),
        malformed=(422, "body line 3, column 5: malformed YAML: expected <block end>, but found '-'"),
        invalid_spec=(422, "parallel.worker: unknown field; did you mean 'workers'?"),
        preflight_failed=(422, "surveys[0].url: there is no survey at s3://surveys/basin.mdio"),
        exceeds_cluster=(
            422,
            "parallel.workers 16 need 20 CPUs in all, but the whole cluster has 8 CPUs and 0 GPUs; take at most 6",
        ),
        idempotency_key_reused=(422, "Idempotency-Key 'night-1' was used for another spec (job 3f2a9c51e07b)"),
    ),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": _SPEC_SCHEMA, "examples": _JSON_EXAMPLES},
                "application/yaml": {"schema": _SPEC_SCHEMA, "examples": _YAML_EXAMPLES},
            },
        }
    },
)
async def submit(
    request: Request,
    response: Response,
    context: Shared,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=200,
            description="Any text; the same key and spec give the same job.",
            examples=["night-1"],
        ),
    ] = None,
) -> JobDetail:
    """The body is a job spec. It is checked in full before anything is stored: its fields, its surveys (they are
    opened), and whether the whole cluster could hold it. Relative local paths are relative to the service."""
    sent = await read_spec(request)
    digest = hashlib.sha256(sent.model_dump_json().encode()).hexdigest()
    if idempotency_key and (known := await asyncio.to_thread(context.store.by_key, idempotency_key)):
        response.status_code = 200
        return _replayed(known, digest, idempotency_key)
    spec = absolute(sent, Path.cwd())
    await _check(spec, context)
    job_id = new_id()
    if spec.output is None:
        spec = spec.model_copy(update={"output": f"{context.settings.output}/{job_id}"})
    try:
        job = await asyncio.to_thread(context.store.create, job_id, spec, digest=digest, key=idempotency_key)
    except KeyTaken as taken:
        response.status_code = 200
        return _replayed(taken.job, digest, idempotency_key)
    failpoint("api.stored")
    response.headers["Location"] = f"/jobs/{job.id}"
    return JobDetail.of_job(job, None)


def _replayed(job: Job, digest: str, key: str | None) -> JobDetail:
    if job.digest != digest:
        raise Problem(
            422, "idempotency_key_reused", f"Idempotency-Key '{key}' was used for another spec (job {job.id})"
        )
    return JobDetail.of_job(job, None)


async def _check(spec: JobSpec, context: Context) -> None:
    capacity: Capacity | None
    try:
        capacity = await context.cluster.totals()
    except SfmError:
        capacity = context.reconciler.capacity  # as last seen; a job may queue while Ray is away
    if capacity and (sentence := too_large(plan.request(spec), capacity, spec.resources.gpu)):
        raise Problem(422, "exceeds_cluster", sentence)
    if context.settings.preflight:
        try:
            await preflight.run(spec)
        except SfmError as error:
            raise Problem(422, "preflight_failed", str(error)) from None


@router.get(
    "", summary="List jobs", responses=documented(invalid_cursor=(422, "cursor 'x' is not one that this list gave"))
)
def page(
    context: Shared,
    limit: Annotated[int, Query(ge=1, le=200, description="Jobs on a page.")] = 50,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.", examples=["41"])] = None,
    state: Annotated[list[State] | None, Query(description="Only jobs in these states.")] = None,
) -> JobPage:
    """Newest first. Jobs that arrive meanwhile shift nothing: a cursor names a job, not a position."""
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise Problem(422, "invalid_cursor", f"cursor '{cursor[:40]}' is not one that this list gave")
    before = int(cursor) if cursor else None
    jobs = context.store.page(limit=limit + 1, before=before, states=state or ())
    more = len(jobs) > limit
    return JobPage(
        jobs=[JobSummary.of(j) for j in jobs[:limit]], next_cursor=str(jobs[limit - 1].number) if more else None
    )


@router.get("/{job_id}", summary="A job in full", responses=NOT_FOUND)
def detail(job_id: str, context: Shared) -> JobDetail:
    """State, why it waits or failed, its spec in full, and the newest metrics."""
    job = _find(job_id, context)
    try:
        records = _read(job, Output.metrics)
    except Problem:
        records = []  # the job itself is known even when its store does not answer
    return JobDetail.of_job(job, records[-1] if records else None)


@router.post(
    "/{job_id}/cancel",
    summary="Cancel a job",
    responses=NOT_FOUND | documented(already_finished=(409, "job 3f2a9c51e07b has already finished: SUCCEEDED")),
)
def cancel(job_id: str, context: Shared) -> JobSummary:
    """A queued job is cancelled at once, a running one becomes CANCELLING until its driver has ended. Cancelling
    again changes nothing."""
    targets = {State.QUEUED: State.CANCELLED, State.SUBMITTING: State.CANCELLING, State.RUNNING: State.CANCELLING}
    while True:  # until nobody changes the state between looking and moving; states only advance, so this ends
        job = _find(job_id, context)
        state = State(job.state)
        if state in (State.CANCELLING, State.CANCELLED):
            return JobSummary.of(job)
        if state in FINISHED:
            raise Problem(409, "already_finished", f"job {job.id} has already finished: {state}")
        context.store.move(job.id, state, targets[state], CANCELLED_BY_USER)


@router.get(
    "/{job_id}/logs",
    summary="What a job printed",
    response_class=StreamingResponse,
    responses=NOT_FOUND
    | {
        200: {
            "description": "The log.",
            "content": {"text/plain": {"schema": {"type": "string"}, "example": "step 120 loss 0.81\n"}},
        }
    },
)
async def logs(
    job_id: str,
    context: Shared,
    follow: Annotated[bool, Query(description="Stay until the job ends.")] = False,
    offset: Annotated[
        int, Query(ge=0, lt=1 << 62, description="Bytes to leave out: go on where a connection broke.")
    ] = 0,
) -> StreamingResponse:
    """Plain text, stored by the service: it stays readable after Ray is gone. A followed log ends when the job has."""
    await asyncio.to_thread(_find, job_id, context)

    async def ended() -> bool:
        if not follow:
            return True
        job = await asyncio.to_thread(context.store.get, job_id)
        return job is None or State(job.state) in FINISHED

    return StreamingResponse(context.logs.follow(job_id, offset, ended), media_type="text/plain; charset=utf-8")


@router.get(
    "/{job_id}/metrics",
    summary="Metrics by step",
    responses=NOT_FOUND | UNREADABLE | {200: {"content": {"application/json": {"example": [METRIC]}}}},
)
def metrics(
    job_id: str,
    context: Shared,
    after_step: Annotated[int, Query(description="Only steps beyond this one.")] = -1,
) -> list[dict[str, Any]]:
    """One record per optimiser step, in order. After a resume the newer record of a step counts."""
    return _read(_find(job_id, context), lambda output: output.metrics(after_step))


@router.get(
    "/{job_id}/artifacts/{name}",
    summary="A file that a job left",
    response_class=Response,
    responses=NOT_FOUND
    | UNREADABLE
    | documented(
        no_such_job=(404, "there is no job 3f2a9c51e07b; GET /jobs lists all"),
        no_such_artifact=(
            404,
            "there is no artifact 'x'; there are: reconstruction.png, loss.png, summary.json, spec.yaml",
        ),
        not_written=(404, "job 3f2a9c51e07b has not written reconstruction.png"),
    )
    | {
        200: {
            "description": "The file.",
            "content": {media: {"schema": {"type": "string", "format": "binary"}} for media in ARTIFACTS.values()},
        }
    },
)
def artifact(job_id: str, name: str, context: Shared) -> Response:
    """One of: reconstruction.png, loss.png, summary.json, spec.yaml."""
    job = _find(job_id, context)
    if name not in ARTIFACTS:
        raise Problem(404, "no_such_artifact", f"there is no artifact '{name[:40]}'; there are: {', '.join(ARTIFACTS)}")
    content = _read(job, lambda output: output.artifact(name))
    if content is None:
        raise Problem(404, "not_written", f"job {job.id} has not written {name}")
    return Response(content, media_type=ARTIFACTS[name], headers={"Cache-Control": "no-cache"})


def _find(job_id: str, context: Context) -> Job:
    job = context.store.get(job_id)
    if job is None:
        raise Problem(404, "no_such_job", f"there is no job {job_id[:40]}; GET /jobs lists all")
    return job


def _read(job: Job, how: Callable[[Output], T]) -> T:
    """Read from a job's output; whatever its store has to say becomes a sentence."""
    try:
        return how(Output(job.output, job.spec.storage))
    except Exception as error:
        sentence = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise Problem(502, "output_unreadable", f"output {job.output} cannot be read: {sentence}") from error
