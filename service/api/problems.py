"""Errors of the API: `application/problem+json` (RFC 9457), with a stable `code` and a sentence in `detail`."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

log = logging.getLogger(__name__)


class ProblemDocument(BaseModel):
    """What every error answer holds."""

    type: str = Field("about:blank", description="Always about:blank: `code` tells errors apart.")
    title: str = Field(description="The HTTP status in words.")
    status: int = Field(description="The HTTP status.")
    code: str = Field(description="Stable name of this error, for programs.")
    detail: str = Field(description="What was wrong, where, and what to do; one sentence per line.")


class Problem(Exception):
    """An error that becomes a problem document; `extra` adds members to it."""

    def __init__(
        self, status: int, code: str, detail: str, *, headers: dict[str, str] | None = None, **extra: object
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.headers, self.extra = status, code, detail, headers, extra

    @property
    def response(self) -> JSONResponse:
        document = ProblemDocument(
            type="about:blank",
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            code=self.code,
            detail=self.detail,
        )
        return JSONResponse(
            document.model_dump() | self.extra,
            status_code=self.status,
            headers=self.headers,
            media_type="application/problem+json",
        )


def documented(**examples: tuple[int, str]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI answers for errors: code = (status, example sentence)."""
    answers: dict[int | str, dict[str, Any]] = {}
    for code, (status, detail) in examples.items():
        title = HTTPStatus(status).phrase
        value = {"type": "about:blank", "title": title, "status": status, "code": code, "detail": detail}
        answer = answers.setdefault(
            status,
            {
                "description": title,
                "content": {
                    "application/problem+json": {
                        "schema": {"$ref": "#/components/schemas/ProblemDocument"},
                        "examples": {},
                    }
                },
            },
        )
        answer["content"]["application/problem+json"]["examples"][code] = {"value": value}
    return answers


_CODES = {404: "not_found", 405: "method_not_allowed"}


def install(app: FastAPI) -> None:
    """Turn every error of `app` into a problem document."""

    @app.exception_handler(Problem)
    async def _problem(_request: Request, error: Problem) -> JSONResponse:
        return error.response

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        code = _CODES.get(error.status_code, "http_error")
        detail = f"{request.method} {request.url.path}: {error.detail}; GET /openapi.json describes what there is"
        return Problem(error.status_code, code, detail, headers=dict(error.headers or {})).response

    @app.exception_handler(RequestValidationError)
    async def _validation(_request: Request, error: RequestValidationError) -> JSONResponse:
        lines = []
        for e in error.errors():
            where, *names = e["loc"]
            lines.append(f"{where} parameter {'.'.join(map(str, names))}: {e['msg'][:1].lower()}{e['msg'][1:]}")
        return Problem(422, "invalid_request", "\n".join(lines)).response

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return Problem(500, "internal", "the service failed on this request; its log has the details").response
