"""Reading a job spec from a request: JSON or YAML, of bounded size, into sentences if it is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from fastapi import Request

from service.api.problems import Problem
from sfm.spec import JobSpec, SpecError, parse_spec, parse_yaml

LARGEST = 1 << 18
"""Bytes of the largest spec that is read."""
YAML_TYPES = {"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"}


async def read_spec(request: Request) -> JobSpec:
    """The spec in a request's body.

    Raises:
        Problem: 413, 415 or 422, with what to change.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and kind not in YAML_TYPES:
        raise Problem(
            415, "unsupported_media_type", f"a job spec is sent as application/json or application/yaml, not {kind}"
        )
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST:
            raise Problem(413, "too_large", f"a job spec holds at most {LARGEST} bytes")
    return await asyncio.to_thread(_spec, bytes(body), _json if kind == "application/json" else _yaml)


def _spec(body: bytes, decode: Callable[[str], Any]) -> JobSpec:
    try:
        data = decode(body.decode())
        # Once around: what is stored must be readable again (an infinite number, say, is not JSON).
        return parse_spec(json.loads(parse_spec(data).model_dump_json()))
    except UnicodeDecodeError:
        raise Problem(422, "malformed", "the body is not UTF-8 text") from None
    except RecursionError:
        raise Problem(422, "malformed", "the body is nested too deeply") from None
    except SpecError as error:
        raise Problem(422, "invalid_spec", str(error)) from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            place = f"line {error.lineno}, column {error.colno}"
            raise Problem(422, "malformed", f"body {place}: malformed JSON: {error.msg}") from None
        raise Problem(422, "malformed", f"malformed JSON: {error}") from None  # a number of too many digits


def _yaml(text: str) -> Any:
    try:
        return parse_yaml(text, where="body")
    except SpecError as error:
        raise Problem(422, "malformed", str(error)) from None
