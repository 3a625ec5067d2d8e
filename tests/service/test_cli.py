"""The commands, against a real service."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest
import yaml
from click.testing import CliRunner, Result

from service import cli
from sfm.spec import SfmError
from tests.service.conftest import reaches, spec, submit


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(spec(surveys=[{"url": "near.mdio"}], output="out")))
    return path


def run(api: httpx.Client, command: object, *args: str) -> Result:
    return CliRunner(env={"SFM_URL": str(api.base_url)}).invoke(command, args)  # type: ignore[arg-type]


def sentence(result: Result) -> str:
    assert isinstance(result.exception, SfmError), result
    return str(result.exception)


def test_submit_and_follow(api: httpx.Client, job_file: Path) -> None:
    result = run(api, cli.submit, str(job_file), "--follow")
    assert result.exit_code == 0, result
    job_id, *log = result.output.splitlines()
    assert log[-1] == "done"
    job = api.get(f"/jobs/{job_id}").json()
    assert job["spec"]["surveys"][0]["url"] == str(job_file.parent / "near.mdio"), "relative to the caller"
    assert job["output"] == str(job_file.parent / "out")
    assert run(api, cli.logs, job_id).output == "".join(f"{line}\n" for line in log)
    shown = yaml.safe_load(run(api, cli.jobs, job_id).output)
    assert (shown["id"], shown["state"]) == (job_id, "SUCCEEDED")


def test_a_failed_job_fails_the_command(api: httpx.Client, job_file: Path) -> None:
    job_file.write_text(yaml.safe_dump(spec(name="fails")))
    result = run(api, cli.submit, str(job_file), "--follow")
    assert "failed: survey nowhere.mdio, chunk 3: no such object" in sentence(result)


def test_json_and_keys(api: httpx.Client, job_file: Path) -> None:
    args = (str(job_file), "--json", "--idempotency-key", f"key-{os.getpid()}")
    first, second = (json.loads(run(api, cli.submit, *args).output) for _ in range(2))
    assert first["id"] == second["id"]
    reaches(api, first["id"], "SUCCEEDED")
    assert json.loads(run(api, cli.jobs, first["id"], "--json").output)["state"] == "SUCCEEDED"
    assert first["id"] in {j["id"] for j in json.loads(run(api, cli.jobs, "--json").output)}


def test_list_and_cancel(api: httpx.Client) -> None:
    job = submit(api, name="waits")
    assert run(api, cli.cancel, job["id"]).output.strip() in {"CANCELLED", "CANCELLING"}
    reaches(api, job["id"], "CANCELLED")
    listed = run(api, cli.jobs, "--state", "cancelled").output
    assert f"{job['id']}  CANCELLED " in listed
    assert "cancelled by request" in listed


def test_errors_are_sentences(api: httpx.Client, job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no job nothing" in sentence(run(api, cli.logs, "nothing"))
    assert "there is no job nothing" in sentence(run(api, cli.cancel, "nothing"))
    assert "No such file" in sentence(run(api, cli.submit, "missing.yaml"))
    job_file.write_text(yaml.safe_dump(spec(parallel={"workers": 64}, batch={"size": 64})))
    assert "parallel.workers 64" in sentence(run(api, cli.submit, str(job_file)))
    monkeypatch.setenv("SFM_URL", "http://127.0.0.1:9")
    result = CliRunner().invoke(cli.jobs, [])
    assert "is 'sfm serve' running" in sentence(result)
