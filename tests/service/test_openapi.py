"""The OpenAPI document: complete, with examples that hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from service.app import create_app
from service.settings import Settings
from sfm.spec import parse_spec


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    state_dir: Path = tmp_path_factory.mktemp("openapi")
    return create_app(Settings(state_dir=state_dir, ray_address="http://127.0.0.1:9")).openapi()


def operations(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"{m.upper()} {p}", o) for p, path in document["paths"].items() for m, o in path.items()]


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [r for v in value.values() for r in references(v)]
    if isinstance(value, list):
        return [r for v in value for r in references(v)]
    return []


def test_form(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for reference in references(document):
        place: Any = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(names) == len(set(names))
    assert {name for name, _ in operations(document)} == {
        "POST /jobs",
        "GET /jobs",
        "GET /jobs/{job_id}",
        "POST /jobs/{job_id}/cancel",
        "GET /jobs/{job_id}/logs",
        "GET /jobs/{job_id}/metrics",
        "GET /jobs/{job_id}/artifacts/{name}",
        "GET /healthz",
        "GET /readyz",
    }


def test_every_operation_says_what_it_does_and_every_error_has_an_example(document: dict[str, Any]) -> None:
    problem = jsonschema.Draft202012Validator(document["components"]["schemas"]["ProblemDocument"])
    for name, operation in operations(document):
        assert operation["summary"], name
        assert operation["description"], name
        for status, answer in operation["responses"].items():
            if int(status) < 400:
                continue
            assert set(answer["content"]) == {"application/problem+json"}, (name, status)
            examples = answer["content"]["application/problem+json"]["examples"]
            assert examples, (name, status)
            for code, example in examples.items():
                problem.validate(example["value"])
                assert (example["value"]["code"], example["value"]["status"]) == (code, int(status))


def test_examples_of_specs_are_specs(document: dict[str, Any]) -> None:
    content = document["paths"]["/jobs"]["post"]["requestBody"]["content"]
    as_json = content["application/json"]["examples"]["tiny"]["value"]
    as_yaml = content["application/yaml"]["examples"]["tiny"]["value"]
    assert parse_spec(as_json) == parse_spec(yaml.safe_load(as_yaml))


def test_examples_of_answers_hold(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name in ("JobSummary", "JobDetail", "JobPage", "Health", "Readiness"):
        (example,) = schemas[name]["examples"]
        jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **document}).validate(example)
