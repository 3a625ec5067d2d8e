"""The control plane as one ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from service.api import console, health, jobs, problems
from service.api.context import Context
from service.api.guard import Guard
from service.api.problems import ProblemDocument, documented
from service.cluster.jobs import Cluster
from service.jobs.logs import Logs
from service.jobs.reconciler import Reconciler
from service.jobs.store import Store
from service.settings import Settings, load_settings
from sfm.spec import JobSpec


def create_app(settings: Settings | None = None) -> FastAPI:
    """The application; while it runs, so does the reconciler. `uvicorn --factory service.app:create_app` works too."""
    settings = settings or load_settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        store = await asyncio.to_thread(Store, settings.database_url)
        cluster = Cluster(settings)
        logs = Logs(settings.state_dir / "logs", cluster)
        reconciler = Reconciler(
            store, cluster, logs, entrypoint=settings.entrypoint, poll_seconds=settings.poll_seconds
        )
        store.on_change = logs.on_end = reconciler.wake
        app.state.context = Context(settings, store, cluster, logs, reconciler)
        loop = asyncio.create_task(reconciler.run(), name="reconciler")
        try:
            yield
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            await logs.close()
            await cluster.close()
            store.close()

    app = FastAPI(
        title="Seismic foundation model training",
        version=version("sfm"),
        summary="Submit, watch and end training jobs on a Ray cluster.",
        description="Every error is `application/problem+json` with a stable `code` and a sentence in `detail`.",
        lifespan=lifespan,
        docs_url=None,  # its scripts come from elsewhere, which the page's policy forbids
        redoc_url=None,
        responses=documented(
            unauthorized=(401, "this service needs its token: send the header 'Authorization: Bearer TOKEN'")
        ),
    )
    problems.install(app)
    app.include_router(jobs.router)
    app.include_router(health.router)
    app.include_router(console.router)
    app.mount("/static", console.static)
    app.add_middleware(Guard, token=settings.token)
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Add to the OpenAPI document what FastAPI cannot see: the job spec, our form of errors, the token."""
    plain = app.openapi
    models: dict[str, type[BaseModel]] = {"JobSpec": JobSpec, "ProblemDocument": ProblemDocument}

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = plain()
            schemas = document["components"]["schemas"]
            for name, model in models.items():
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas.update(schema.pop("$defs", {}))
                schemas[name] = schema
            document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"token": []}, {}]
            schemas.pop("HTTPValidationError", None)
            schemas.pop("ValidationError", None)
            for path in document["paths"].values():
                for operation in path.values():
                    _own_errors(operation["responses"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _own_errors(responses: dict[str, Any]) -> None:
    """Replace FastAPI's form of validation errors, which we never answer with, by ours."""
    if "422" not in responses:
        return
    content = responses["422"].get("content", {})
    content.pop("application/json", None)
    if not content:
        sentence = "query parameter limit: input should be greater than or equal to 1"
        responses["422"] = documented(invalid_request=(422, sentence))[422]
