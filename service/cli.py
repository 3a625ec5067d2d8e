"""Commands of the control plane: serve, submit, jobs, logs, cancel."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from service.client import Client, ClientError
from sfm.spec import SfmError, absolute, load_spec

if TYPE_CHECKING:
    from service.settings import Settings

# What the server needs (Ray, FastAPI) is imported by `serve` only: the other commands answer at once.

JOB = click.argument("job_id")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class ServeError(SfmError):
    """The service cannot start here."""


@click.command()
@click.option("--host", help="Address to listen on [SFM_HOST, 127.0.0.1]. Others can reach it only with SFM_TOKEN set.")
@click.option("--port", type=int, help="TCP port; 0 takes a free one [SFM_PORT, 8100].")
@click.option("--ray-address", help="'local' or a dashboard URL such as http://head:8265 [SFM_RAY_ADDRESS, local].")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), help="Database, logs, our Ray head [SFM_STATE_DIR, .sfm]."
)
@click.option("--output", help="Root URL of job outputs, a path or s3:// [SFM_OUTPUT, STATE_DIR/runs].")
@click.option("--stop-ray-on-exit", is_flag=True, help="End our own Ray head, and its jobs, when the service ends.")
@click.option("--stop-ray", is_flag=True, help="Do not serve: end the Ray head that a service left running.")
def serve(stop_ray: bool, stop_ray_on_exit: bool, **options: Any) -> None:
    """Run the control plane, its page and, by default, a Ray head of its own.

    The Ray head and its jobs outlive the service: start it again and it goes on with them.
    """
    from service.cluster import head
    from service.settings import load_settings

    settings = load_settings(**options)
    if stop_ray:
        stopped = head.stop(settings.state_dir)
        click.echo("Ray was stopped" if stopped else f"no Ray head of {settings.state_dir} is running")
        return
    try:
        _serve(settings)
    finally:
        if stop_ray_on_exit:
            head.stop(settings.state_dir)


def _serve(settings: Settings) -> None:
    import uvicorn

    from service.app import create_app
    from service.cluster import head
    from service.jobs.lock import only_one

    with _listen(settings) as listener, only_one(settings.state_dir):
        if settings.ray_address == "local":
            head.start_or_rejoin(settings.state_dir, num_cpus=settings.ray_num_cpus)
        # Followers are cut off, not ended, when the service stops: to them a clean end means that the job has ended.
        config = uvicorn.Config(create_app(settings), log_level="warning", timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        shown = "localhost" if settings.host in ("0.0.0.0", "::") else settings.host
        url = f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"
        asyncio.run(_run(server, listener, url))


async def _run(server: Any, listener: socket.socket, url: str) -> None:
    # Signals end the server only: left to itself, it then ends the process, but we have work after it.
    server.capture_signals = contextlib.nullcontext
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.05)
    if server.started:
        click.echo(f"sfm is ready: {url}")
    await serving
    if not server.started:
        raise ServeError("the service did not start; the lines above say why")


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ServeError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; "
            "choose another with --port (0 takes a free one)"
        ) from None
    return listener


@click.command()
@click.argument("job", type=click.Path(path_type=Path))
@click.option("--follow", "-f", is_flag=True, help="Print the job's log until it ends; fail if it fails.")
@click.option("--idempotency-key", help="The same key and spec give the same job, however often they are sent.")
@AS_JSON
def submit(job: Path, follow: bool, idempotency_key: str | None, as_json: bool) -> None:
    """Submit the job spec in file JOB; print its id. Relative paths in it are relative to this directory."""

    spec = absolute(load_spec(job), Path.cwd())
    headers = {"Content-Type": "application/json"}
    if idempotency_key:
        headers["Idempotency-Key"] = idempotency_key
    client = Client()
    stored = client.request("POST", "/jobs", content=spec.model_dump_json(), headers=headers)
    click.echo(json.dumps(stored) if as_json else stored["id"])
    if follow:
        for part in client.log(stored["id"], follow=True):
            click.echo(part, nl=False)
        ended = client.request("GET", f"/jobs/{stored['id']}")
        if ended["state"] != "SUCCEEDED":
            reason = f": {ended['reason']}" if ended["reason"] else ""
            raise ClientError(f"job {stored['id']} {ended['state'].lower()}{reason}")


@click.command()
@click.argument("job_id", required=False)
@click.option("--state", "states", multiple=True, help="Only jobs in this state; may be repeated.")
@AS_JSON
def jobs(job_id: str | None, states: tuple[str, ...], as_json: bool) -> None:
    """List the newest jobs, or show one in full."""
    client = Client()
    if job_id:
        shown = client.request("GET", f"/jobs/{job_id}")
        click.echo(json.dumps(shown) if as_json else _in_full(shown))
        return
    page = client.request("GET", "/jobs", params={"state": [s.upper() for s in states]})
    if as_json:
        click.echo(json.dumps(page["jobs"]))
        return
    for job in page["jobs"]:
        reason = (job["reason"] or "").replace("\n", "; ")
        click.echo(f"{job['id']}  {job['state']:<10}  {job['created_at'][:19]}Z  {job['name']}  {reason}".rstrip())
    if page["next_cursor"]:
        click.echo("(older jobs: GET /jobs with the cursor)", err=True)


def _in_full(job: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump({k: v for k, v in job.items() if v is not None}, sort_keys=False).rstrip()


@click.command()
@JOB
@click.option("--follow", "-f", is_flag=True, help="Stay until the job ends.")
def logs(job_id: str, follow: bool) -> None:
    """Print what a job printed."""
    for part in Client().log(job_id, follow=follow):
        click.echo(part, nl=False)


@click.command()
@JOB
def cancel(job_id: str) -> None:
    """Cancel a job."""
    click.echo(Client().request("POST", f"/jobs/{job_id}/cancel")["state"])
