"""Metrics and artifacts, from local directories and from S3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs

from service.jobs.outputs import Output
from sfm.spec import Storage
from sfm.survey.devstore import DevStore


def lines(*records: tuple[int, float]) -> str:
    return "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in records)


def test_later_parts_win_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    parts = tmp_path / "metrics"
    parts.mkdir()
    (parts / "0001.jsonl").write_text(lines((2, 20.0), (3, 30.0), (4, float("nan"))) + '{"step": 5, "lo')
    (parts / "0000.jsonl").write_text(lines((0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)))
    (parts / "notes.txt").write_text("no metrics")
    output = Output(str(tmp_path), Storage())
    assert [(r["step"], r["loss"]) for r in output.metrics()] == [(0, 0.0), (1, 1.0), (2, 20.0), (3, 30.0), (4, None)]
    assert [r["step"] for r in output.metrics(after_step=3)] == [4]


def test_nothing_written_yet(tmp_path: Path) -> None:
    output = Output(str(tmp_path / "not there"), Storage())
    assert output.metrics() == []
    assert output.artifact("summary.json") is None


@pytest.mark.parametrize("name", ["../secret", "metrics/0000.jsonl", "", "summary.json/../../secret"])
def test_only_known_names_are_artifacts(tmp_path: Path, name: str) -> None:
    with pytest.raises(KeyError):
        Output(str(tmp_path), Storage()).artifact(name)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DevStore]:
    """A real S3 server with a bucket `models`; its keys, and nothing else of it, in the environment."""
    (tmp_path / "models").mkdir()
    with DevStore(tmp_path) as running:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", running.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", running.secret_key)
        yield running


def test_s3(store: DevStore, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = store.endpoint_url
    bucket = s3fs.S3FileSystem(endpoint_url=endpoint, client_kwargs={"region_name": "us-east-1"})
    bucket.pipe_file("models/run/metrics/0000.jsonl", lines((0, 1.0)).encode())
    output = Output("s3://models/run", Storage(endpoint_url=endpoint, region="us-east-1"))
    assert output.metrics() == [{"step": 0, "loss": 1.0}]
    bucket.pipe_file("models/run/metrics/0001.jsonl", lines((0, 2.0), (1, 3.0)).encode())
    bucket.pipe_file("models/run/summary.json", b"{}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    by_environment = Output("s3://models/run", Storage())
    assert by_environment.metrics() == [{"step": 0, "loss": 2.0}, {"step": 1, "loss": 3.0}], "listings are not kept"
    assert by_environment.artifact("summary.json") == b"{}"
    assert by_environment.artifact("loss.png") is None


def test_of_a_repeated_step_the_record_written_last_counts(tmp_path: Path) -> None:
    """A resume from step 120 wrote part 121 anew, further than the old part 130, which is still there."""
    parts = tmp_path / "metrics"
    parts.mkdir()

    def part(first: int, last: int, loss: float, time: float) -> None:
        records = [{"step": step, "loss": loss, "time": time} for step in range(first, last + 1)]
        (parts / f"step-{first:08d}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    part(130, 139, loss=9.0, time=1.0)
    part(121, 140, loss=1.0, time=2.0)
    assert {record["loss"] for record in Output(str(tmp_path), Storage()).metrics()} == {1.0}
