"""Jobs of a Ray cluster, over its job API: submit, look, stop, logs, totals.

Whatever goes wrong on the way is one of two errors: `Unreachable` (try again later) or `Refused` (the
cluster answered and said no).
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from ray.exceptions import RayError
from ray.job_submission import JobSubmissionClient

from service.cluster import head
from service.jobs.lifecycle import Seen
from service.jobs.scheduler import Capacity
from service.settings import Settings
from sfm.spec import SfmError

REQUEST_SECONDS = 30.0
_MODEL = "accelerator_type:"  # and the model: what Ray says a node has

for _name in (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
):
    logging.getLogger(_name).setLevel(logging.WARNING)  # each upload is no news


class Unreachable(SfmError):
    """The Ray cluster does not answer."""


class Refused(SfmError):
    """The Ray cluster refused a request; the sentence is its own."""


@dataclass(frozen=True)
class RayJob:
    """What Ray says about one submission."""

    seen: Seen
    message: str = ""


class Cluster:
    """One Ray cluster: our own head (`ray_address` local), or any by its dashboard's URL."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._http: httpx.AsyncClient | None = None
        self.address = ""
        self.headers: dict[str, str] = {}
        # Ray's client lets these override the address it is given.
        os.environ.pop("RAY_ADDRESS", None)
        os.environ.pop("RAY_API_SERVER_ADDRESS", None)

    async def connect(self) -> None:
        """Find the cluster; start our own head if that is what the settings say and it does not run.

        Raises:
            HeadError: our own head cannot be started.
        """
        token: str | None
        if self._settings.ray_address == "local":
            found = await asyncio.to_thread(
                head.start_or_rejoin, self._settings.state_dir, num_cpus=self._settings.ray_num_cpus
            )
            address, token = found.address, found.token
        else:
            address, token = self._settings.ray_address.rstrip("/"), _token_of_environment()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if (address, headers) != (self.address, self.headers) or self._http is None:
            await self.close()
            self.address, self.headers = address, headers
            self._http = httpx.AsyncClient(base_url=address, headers=headers, timeout=REQUEST_SECONDS)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def submit(self, submission_id: str, entrypoint: str, files: Mapping[str, str]) -> None:
        """Start shell command `entrypoint` in a directory that holds `files` (name to text).

        A submission that Ray already knows is adopted: to submit twice is to submit once.

        Raises:
            Unreachable, Refused
        """
        try:
            await asyncio.wait_for(
                asyncio.to_thread(self._submit, submission_id, entrypoint, files), 4 * REQUEST_SECONDS
            )
        except (OSError, TimeoutError) as error:  # requests' errors are OSErrors
            raise Unreachable(f"Ray at {self.address} does not answer: {_first_line(error)}") from error
        except (RuntimeError, ValueError, RayError) as error:
            if "already exists" not in str(error):
                raise Refused(f"Ray refused the job: {_first_line(error)}") from error

    def _submit(self, submission_id: str, entrypoint: str, files: Mapping[str, str]) -> None:
        with tempfile.TemporaryDirectory(prefix="sfm-job-") as directory:
            for name, content in files.items():
                (Path(directory) / name).write_text(content)
            # Ray decodes a driver's log strictly as UTF-8; unbuffered, its lines arrive as they are printed.
            variables = {
                "PYTHONUNBUFFERED": "1",
                "PYTHONIOENCODING": "utf-8:backslashreplace",
                "RAY_COLOR_PREFIX": "0",
                "SFM_MAX_CPUS": str(self._settings.max_cpus),
                "SFM_MAX_GPUS": str(self._settings.max_gpus),
            }
            self._client().submit_job(
                entrypoint=entrypoint,
                submission_id=submission_id,
                runtime_env={"working_dir": directory, "env_vars": variables},
            )

    async def look(self, submission_id: str) -> RayJob:
        """What Ray says about a submission now.

        Raises:
            Unreachable, Refused
        """
        response = await self._request("GET", f"/api/jobs/{submission_id}")
        if response.status_code == 404:
            return RayJob(Seen.ABSENT)
        job = _answer(response)
        return RayJob(Seen(job["status"]), job.get("message") or "")

    async def stop(self, submission_id: str) -> None:
        """Ask a job to end: SIGTERM, then SIGKILL. A job that Ray does not know is no error.

        Raises:
            Unreachable, Refused
        """
        response = await self._request("POST", f"/api/jobs/{submission_id}/stop")
        if response.status_code != 404:
            _answer(response)

    async def logs(self, submission_id: str) -> str:
        """All that a job has printed so far.

        Raises:
            Unreachable, Refused
        """
        return str(_answer(await self._request("GET", f"/api/jobs/{submission_id}/logs"))["logs"])

    async def tail(self, submission_id: str) -> AsyncIterator[str]:
        """What a job prints, from its first character, as it prints it; ends with the job.

        Raises:
            Unreachable: the connection was lost.
        """
        try:
            client = await asyncio.to_thread(self._client)
            async for part in client.tail_job_logs(submission_id):
                yield part
        except (OSError, RuntimeError, RayError) as error:
            raise Unreachable(f"the log of {submission_id} broke off: {_first_line(error)}") from error

    async def totals(self) -> Capacity:
        """Logical CPUs and GPUs of all live nodes together, GPUs also by their model.

        Raises:
            Unreachable, Refused
        """
        response = await self._request("GET", "/api/v0/nodes", params={"limit": 10000, "detail": 1})
        nodes = _answer(response)["data"]["result"]["result"]
        totals = [n["resources_total"] for n in nodes if n["state"] == "ALIVE"]
        return capacity_of(totals, self._settings)

    def _client(self) -> JobSubmissionClient:
        if not self.address:
            raise Unreachable("Ray is not connected yet")
        return JobSubmissionClient(self.address, headers=dict(self.headers))

    async def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        if self._http is None:
            raise Unreachable("Ray is not connected yet")
        try:
            return await self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise Unreachable(f"Ray at {self.address} does not answer: {_first_line(error)}") from error


def capacity_of(totals: Sequence[Mapping[str, float]], settings: Settings) -> Capacity:
    """What nodes with these totals, by Ray's names, have together, and what the cluster grows to by itself."""
    cpus, gpus = (sum(node.get(name, 0) for node in totals) for name in ("CPU", "GPU"))
    models: dict[str, float] = {}
    for node in totals:
        for name in node:
            if name.startswith(_MODEL):
                model = name.removeprefix(_MODEL)
                models[model] = models.get(model, 0) + node.get("GPU", 0)
    known = None if settings.max_gpus else models
    return Capacity(max(cpus, settings.max_cpus), max(gpus, settings.max_gpus), known)


def _answer(response: httpx.Response) -> Any:
    if response.is_server_error and response.status_code in (502, 503, 504):
        raise Unreachable(f"Ray at {response.url.host} answers {response.status_code}")
    if response.is_error:
        if response.status_code in (401, 403):
            raise Refused("Ray refuses our token; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's")
        raise Refused(f"Ray answers {response.status_code}: {response.text.strip()[:300]}")
    return response.json()


def _token_of_environment() -> str | None:
    """The token where Ray's own clients look for it."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
