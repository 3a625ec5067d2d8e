"""Jobs over HTTP: what is accepted, what is refused, and that every refusal is a problem document."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml

from service.api.bodies import LARGEST
from service.jobs import preflight
from service.settings import Settings, SettingsError, load_settings
from sfm.spec import JobSpec, SfmError
from tests.service.conftest import DRIVER, assert_problem, reaches, running, spec, starts, submit

YAML = {"Content-Type": "application/yaml"}
JSON = {"Content-Type": "application/json"}


def test_a_job_runs_and_leaves_its_results(api: httpx.Client) -> None:
    response = api.post("/jobs", json=spec())
    assert response.status_code == 201
    job = response.json()
    assert response.headers["location"] == f"/jobs/{job['id']}"
    assert job["state"] == "QUEUED"
    job = reaches(api, job["id"], "SUCCEEDED")
    assert job["spec"]["output"] == job["output"]
    assert job["output"].endswith(f"/runs/{job['id']}")
    assert job["spec"]["optimiser"]["lr"] == 1e-3, "defaults are written out"
    assert job["created_at"] <= job["submitted_at"] <= job["finished_at"]
    assert job["created_at"].endswith("Z")
    assert job["metrics"]["step"] == 2
    assert [r["step"] for r in api.get(f"/jobs/{job['id']}/metrics").json()] == [0, 1, 2]
    assert [r["step"] for r in api.get(f"/jobs/{job['id']}/metrics", params={"after_step": 0}).json()] == [1, 2]
    assert starts(job) == 1

    picture = api.get(f"/jobs/{job['id']}/artifacts/reconstruction.png")
    assert (picture.headers["content-type"], picture.content) == ("image/png", b"\x89PNG picture")
    assert api.get(f"/jobs/{job['id']}/artifacts/summary.json").json() == {"steps": 3}
    assert_problem(api.get(f"/jobs/{job['id']}/artifacts/loss.png"), 404, "not_written", "loss.png")
    assert_problem(api.post(f"/jobs/{job['id']}/cancel"), 409, "already_finished", "SUCCEEDED")
    assert api.get(f"/jobs/{job['id']}/logs").text.endswith("done\n")


def test_yaml_is_read_like_json(lonely: httpx.Client) -> None:
    as_yaml = lonely.post("/jobs", content=yaml.safe_dump(spec(name="y")), headers=YAML | {"Idempotency-Key": "k"})
    assert as_yaml.status_code == 201
    as_json = lonely.post("/jobs", json=spec(name="y"), headers={"Idempotency-Key": "k"})
    assert as_json.status_code == 200
    assert as_json.json()["id"] == as_yaml.json()["id"]


def test_one_key_gives_one_job_however_often_and_at_once(lonely: httpx.Client) -> None:
    def post(_: int) -> httpx.Response:
        return lonely.post("/jobs", json=spec(), headers={"Idempotency-Key": "night"})

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(post, range(20)))
    assert sorted(a.status_code for a in answers) == [200] * 19 + [201]
    assert len({a.json()["id"] for a in answers}) == 1
    assert len(lonely.get("/jobs").json()["jobs"]) == 1
    other = lonely.post("/jobs", json=spec(steps=4), headers={"Idempotency-Key": "night"})
    assert_problem(other, 422, "idempotency_key_reused", "night")


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\n" + "surveys: *b\n"
REFUSED = {
    "broken yaml": ("surveys: [\n  - x", YAML, 422, "malformed", "line 2"),
    "broken json": ('{"surveys": [}', JSON, 422, "malformed", "line 1, column 14"),
    "aliases": (BOMB, YAML, 422, "malformed", "aliases"),
    "impossible date": ("name: 2020-13-45", YAML, 422, "malformed", "month"),
    "not text": (b"\xff\xfe", JSON, 422, "malformed", "UTF-8"),
    "deep nesting": ("[" * 100_000, JSON, 422, "malformed", "deep"),
    "deep yaml": ("[" * 20_000, YAML, 422, "malformed", "deep"),
    "huge number": ('{"steps": ' + "9" * 5000 + "}", JSON, 422, "malformed", "JSON"),
    "a list": ("[]", JSON, 422, "invalid_spec", "mapping"),
    "empty": ("", YAML, 422, "invalid_spec", "mapping"),
    "unknown field": (json.dumps(spec(stepz=3)), JSON, 422, "invalid_spec", "did you mean 'steps'?"),
    "impossible": (json.dumps(spec(batch={"size": 3}, parallel={"workers": 2})), JSON, 422, "invalid_spec", "multiple"),
    "infinite": (json.dumps(spec(optimiser={"eps": float("inf")})), JSON, 422, "invalid_spec", "eps"),
    "two mistakes": (json.dumps(spec(steps=0, seed=-1)), JSON, 422, "invalid_spec", "seed"),
    "other type": ("x", {"Content-Type": "text/plain"}, 415, "unsupported_media_type", "text/plain"),
    "too large": (b"x" * (LARGEST + 1), JSON, 413, "too_large", str(LARGEST)),
}


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> object:
    settings = Settings(state_dir=tmp_path_factory.mktemp("closed"), ray_address="http://127.0.0.1:9", preflight=False)
    with running(settings) as client:
        yield client


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(closed: httpx.Client, case: str) -> None:
    body, headers, status, code, word = REFUSED[case]
    assert_problem(closed.post("/jobs", content=body, headers=headers), status, code, word)
    assert closed.get("/jobs").json() == {"jobs": [], "next_cursor": None}, "nothing was stored"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/jobs/000000000000", 404, "no_such_job"),
        ("GET", "/jobs/000000000000/logs", 404, "no_such_job"),
        ("GET", "/jobs/000000000000/logs?follow=true", 404, "no_such_job"),
        ("GET", "/jobs/000000000000/metrics", 404, "no_such_job"),
        ("GET", "/jobs/000000000000/artifacts/loss.png", 404, "no_such_job"),
        ("POST", "/jobs/000000000000/cancel", 404, "no_such_job"),
        ("GET", "/jobs?limit=0", 422, "invalid_request"),
        ("GET", "/jobs?limit=x", 422, "invalid_request"),
        ("GET", "/jobs?state=GONE", 422, "invalid_request"),
        ("GET", "/jobs?cursor=x", 422, "invalid_cursor"),
        ("GET", "/jobs?cursor=²", 422, "invalid_cursor"),
        ("GET", "/jobs/x/logs?offset=-1", 422, "invalid_request"),
        ("DELETE", "/jobs", 405, "method_not_allowed"),
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/static/nothing.js", 404, "not_found"),
        ("GET", "/static/../app.py", 404, "not_found"),
        ("GET", "/static/%2e%2e/app.py", 404, "not_found"),
    ],
)
def test_errors_are_problem_documents(closed: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    assert_problem(closed.request(method, path), status, code)


def test_no_path_from_a_client_reaches_the_file_system(api: httpx.Client) -> None:
    job = reaches(api, submit(api)["id"], "SUCCEEDED")
    (Path(job["output"]).parent / "secret").write_text("hidden words")
    hostile = ["..%2Fsecret", "%2e%2e%2fsecret", "starts.txt", "%252e%252e%252fsecret", "summary.json%00.png"]
    for name in hostile:
        response = api.get(f"/jobs/{job['id']}/artifacts/{name}")
        assert response.status_code == 404, name
        assert_problem(response, 404, response.json()["code"])
        assert "hidden words" not in response.text


def test_pages(lonely: httpx.Client) -> None:
    ids = [submit(lonely)["id"] for _ in range(5)]
    first = lonely.get("/jobs", params={"limit": 2}).json()
    submit(lonely)
    rest = lonely.get("/jobs", params={"limit": 3, "cursor": first["next_cursor"]}).json()
    assert [j["id"] for j in first["jobs"] + rest["jobs"]] == ids[::-1]
    assert rest["next_cursor"] is None
    lonely.post(f"/jobs/{ids[0]}/cancel")
    found = lonely.get("/jobs", params=[("state", "CANCELLED"), ("state", "FAILED")]).json()["jobs"]
    assert [j["id"] for j in found] == [ids[0]]


def test_a_queued_job_is_cancelled_at_once_and_again(lonely: httpx.Client) -> None:
    job = submit(lonely)
    for _ in range(2):
        response = lonely.post(f"/jobs/{job['id']}/cancel")
        assert (response.status_code, response.json()["state"]) == (200, "CANCELLED")
    assert lonely.get(f"/jobs/{job['id']}/logs", params={"follow": True}).text == ""


def test_a_running_job_is_cancelled(api: httpx.Client) -> None:
    job = submit(api, name="waits")
    reaches(api, job["id"], "RUNNING")
    answer = api.post(f"/jobs/{job['id']}/cancel").json()
    assert answer["state"] == "CANCELLING"
    assert api.post(f"/jobs/{job['id']}/cancel").is_success, "cancelling twice is no error"
    job = reaches(api, job["id"], "CANCELLED")
    assert job["reason"] == "cancelled by request"
    assert "before 99\n" in api.get(f"/jobs/{job['id']}/logs").text
    assert "after" not in api.get(f"/jobs/{job['id']}/logs").text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fails", "survey nowhere.mdio, chunk 3: no such object"),
        ("crashes", "Job entrypoint command failed with exit code 3; the last line of its log: last words"),
    ],
)
def test_a_failed_job_says_why(api: httpx.Client, name: str, reason: str) -> None:
    assert reaches(api, submit(api, name=name)["id"], "FAILED")["reason"] == reason


def test_a_log_is_followed_without_loss_or_repetition(api: httpx.Client) -> None:
    job = submit(api, name="chatty")
    with api.stream("GET", f"/jobs/{job['id']}/logs", params={"follow": True}) as response:
        assert response.headers["content-type"] == "text/plain; charset=utf-8"
        followed = b"".join(response.iter_raw()).decode()
    expected = [f"line {number} ünïcode" for number in range(3000)]
    lines = followed.splitlines()
    assert [line for line in lines if line.startswith("line ")] == expected
    assert lines.count("error: none of this is lost") == 1
    assert api.get(f"/jobs/{job['id']}").json()["state"] == "SUCCEEDED", "a followed log ends when the job has"
    assert api.get(f"/jobs/{job['id']}/logs").text == followed
    assert api.get(f"/jobs/{job['id']}/logs", params={"offset": 500}).content == followed.encode()[500:]


def test_jobs_wait_for_room_and_say_why(api: httpx.Client) -> None:
    large = {"parallel": {"workers": 6}, "batch": {"size": 6}}  # 7.5 of 8 CPUs
    first = submit(api, name="waits", **large)
    second = submit(api, name="waits", **large)
    third = submit(api, name="quick")
    urgent = submit(api, name="quick", scheduling={"priority": 5}, **large)
    reaches(api, first["id"], "RUNNING")

    def reason(job: dict[str, object]) -> str:
        return str(reaches(api, str(job["id"]), "QUEUED")["reason"])

    assert reason(urgent) == "needs 7.5 CPUs, but 0.5 CPUs and 0 GPUs are free now; waits for running jobs to end"
    assert reason(second) == f"waits behind job {urgent['id']}, which is ahead in the queue and waits for room"
    assert reason(third) == reason(second)
    for job in (first, second):
        Path(job["output"]).mkdir(parents=True, exist_ok=True)
        (Path(job["output"]) / "go").touch()
    ended = [reaches(api, job["id"], "SUCCEEDED") for job in (first, urgent, second, third)]
    assert [job["reason"] for job in ended] == [None] * 4
    submitted = [job["submitted_at"] for job in ended]
    assert submitted == sorted(submitted), "priority first, then first come"


def test_a_job_larger_than_the_cluster_is_refused(api: httpx.Client) -> None:
    before = api.get("/jobs").json()
    too_many = api.post("/jobs", json=spec(parallel={"workers": 16}, batch={"size": 16}))
    assert_problem(too_many, 422, "exceeds_cluster", "parallel.workers 16", "20 CPUs", "8 CPUs", "take at most 6")
    no_gpus = api.post("/jobs", json=spec(resources={"device": "gpu"}))
    assert_problem(no_gpus, 422, "exceeds_cluster", "parallel.workers 1", "1 GPUs")
    assert api.get("/jobs").json() == before


def test_surveys_are_opened_before_a_job_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[JobSpec] = []

    def check(job: JobSpec) -> None:
        asked.append(job)
        raise SfmError("surveys[0].url: there is no survey at /surveys/nowhere.mdio")

    monkeypatch.setattr(preflight, "_checks", lambda: [check])
    with running(Settings(state_dir=tmp_path, ray_address="http://127.0.0.1:9", entrypoint=DRIVER)) as client:
        response = client.post("/jobs", json=spec(surveys=[{"url": "near.mdio"}]))
        assert_problem(response, 422, "preflight_failed", "there is no survey")
        assert client.get("/jobs").json()["jobs"] == []
    assert asked[0].surveys[0].url == str(Path.cwd() / "near.mdio"), "relative to the service"


def test_health(lonely: httpx.Client, api: httpx.Client) -> None:
    assert lonely.get("/healthz").json() == {"status": "ok"}
    assert_problem(lonely.get("/readyz"), 503, "not_ready", "ray:")
    assert api.get("/readyz").json() == {"database": "ok", "reconciler": "ok", "ray": "ok"}


def test_a_token_guards_everything_but_health_and_the_page(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path, ray_address="http://127.0.0.1:9", token="s3cret", preflight=False)
    with running(settings) as client:
        assert client.get("/jobs").json() == {"jobs": [], "next_cursor": None}
        for wrong in ("", "Bearer", "Bearer wrong", "Basic s3cret", "Bearer ü"):
            headers = {"Authorization": wrong.encode()}
            for method, path in [("GET", "/jobs"), ("POST", "/jobs"), ("GET", "/openapi.json"), ("PUT", "/nothing")]:
                response = client.request(method, path, headers=headers)
                assert_problem(response, 401, "unauthorized", "SFM_TOKEN")
                assert response.headers["www-authenticate"] == "Bearer"
            for path in ("/", "/static/console.js", "/healthz"):
                assert client.get(path, headers=headers).is_success


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example"}, "foreign_host"),
        ({"Host": "127.0.0.1.evil.example:80"}, "foreign_host"),
        ({"Host": "["}, "foreign_host"),
        ({"Origin": "http://evil.example"}, "cross_origin"),
        ({"Origin": "null"}, "cross_origin"),
    ],
)
def test_other_web_pages_are_kept_out(closed: httpx.Client, headers: dict[str, str], code: str) -> None:
    assert_problem(closed.post("/jobs", json=spec(), headers=headers), 403, code)


def test_an_open_port_needs_a_token() -> None:
    with pytest.raises(SettingsError, match=r"host 0\.0\.0\.0 can be reached by others.*SFM_TOKEN"):
        load_settings(host="0.0.0.0")
    assert load_settings(host="0.0.0.0", token="t").token == "t"
    assert load_settings(token="").token is None
    with pytest.raises(SettingsError, match="must be 'local' or a dashboard URL"):
        load_settings(ray_address="head:8265")


def test_the_page_takes_nothing_from_elsewhere(closed: httpx.Client) -> None:
    for path in ("/", "/static/console.js", "/static/console.css"):
        response = closed.get(path)
        assert response.is_success
        assert "default-src 'none'" in response.headers["content-security-policy"]
        text = response.text.replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text
        assert "https:" not in text
        assert "innerHTML" not in text
    assert "<script>" not in closed.get("/").text
