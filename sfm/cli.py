"""The command `sfm`: gathers sub-commands from the entry points of group `sfm.commands`."""

from __future__ import annotations

import json
import sys
from importlib.metadata import entry_points
from typing import Any

import click

from sfm import plan
from sfm.plan.fit import changed
from sfm.plan.machines import GPUS
from sfm.plan.outlook import EFFICIENCY
from sfm.spec import JobSpec, SfmError, dump_spec, load_spec

_SERVICE = ("fastapi", "httpx", "pydantic_settings", "ray", "sqlalchemy", "uvicorn")


class Gathered(click.Group):
    """A group whose commands are looked up in entry points and imported only when used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted({e.name for e in entry_points(group="sfm.commands")})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        found = {e.name: e for e in entry_points(group="sfm.commands")}
        if cmd_name not in found:
            return None
        return found[cmd_name].load()


@click.group(cls=Gathered, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sfm")
def sfm() -> None:
    """Train seismic foundation models on MDIO surveys."""


@click.command()
@click.argument("job", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def validate(job: str, as_json: bool) -> None:
    """Check a job spec and print it in full."""
    spec = load_spec(job)
    plan.check(spec)
    click.echo(json.dumps(json.loads(spec.model_dump_json())) if as_json else dump_spec(spec))


@click.command("plan")
@click.argument("job", type=click.Path())
@click.option("--gpu", type=click.Choice(list(GPUS)), help="As though the job named this kind of GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_(job: str, gpu: str | None, as_json: bool) -> None:
    """Say what a job takes: memory, operations and communication per step, and on which GPUs it fits. All predicted."""
    asked = load_spec(job)
    if gpu is not None:
        asked = changed(asked, [("resources.device", "gpu"), ("resources.gpu", gpu), ("resources.memory_gib", None)])
    spec = plan.settle(asked)
    forecasts = [plan.forecast(spec, name) for name in ([gpu] if gpu else GPUS)]
    click.echo(json.dumps(_figures(spec, forecasts)) if as_json else _table(spec, forecasts))
    try:
        plan.check(asked)
    except SfmError as error:
        if gpu is None:
            raise
        click.echo(f"on {gpu} it does not fit: {error}", err=as_json)  # no error: nothing was asked to run there


def _figures(spec: JobSpec, forecasts: list[plan.Forecast]) -> dict[str, Any]:
    """What `sfm plan --json` prints: bytes, seconds and operations of one optimiser step."""
    memory, operations = plan.memory(spec), plan.flops(spec)
    return {
        "tokens_per_sample": spec.tokens,
        "visible_tokens": spec.visible,
        "mask_ratio": spec.mask_ratio,
        "parameters": plan.parameters(spec),
        "context_mode": spec.parallel.context_mode,
        "flops_per_sample": {**vars(operations), "model": operations.model, "hardware": operations.hardware},
        "memory_per_device_bytes": {**vars(memory), "total": memory.total},
        "bytes_sent_per_device": {
            "attention": max(plan.context_traffic(spec)),
            "engine": plan.engine_traffic(spec),
        },
        "request": vars(plan.request(spec)),
        "forecasts": [{**f._asdict(), "memory": f.memory.total, "fits": f.fits} for f in forecasts],
    }


def _table(spec: JobSpec, forecasts: list[plan.Forecast]) -> str:
    memory, operations, parallel = plan.memory(spec), plan.flops(spec), spec.parallel
    parts = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in vars(memory).items())
    shares = ", ".join(f"{name} {getattr(operations, name) / operations.model:.0%}" for name in ("encoder", "decoder"))
    how = f", attention by {parallel.context_mode}" if parallel.context > 1 else ""
    lines = [
        f"tokens per sample    {spec.tokens:,} = {' x '.join(map(str, spec.grid))}, {spec.visible:,} visible "
        f"(mask ratio {spec.mask_ratio:.6g})",
        f"parameters           {plan.parameters(spec):,}",
        f"workers              {parallel.workers} = {parallel.data} data x {parallel.context} context{how}; "
        f"{spec.accumulation} micro-batches of {spec.micro_batch} a step",
        f"operations           {operations.model / 1e12:,.2f} TFLOP a sample ({shares})",
        f"memory per device    {memory.total / 2**30:.2f} GiB ({parts})",
        f"sent per device      {max(plan.context_traffic(spec)) / 1e9:,.2f} GB by attention, "
        f"{plan.engine_traffic(spec) / 1e9:,.2f} GB by {parallel.engine}, each step",
        "",
        f"Predicted, at {EFFICIENCY:.0%} of the peak; exchange is what it takes if none of it is hidden:",
        "GPU    fits  compute/step  exchange/step  samples/s  fewest GPUs that hold one sample",
    ]
    for f in forecasts:
        exchange = f.context_seconds + f.engine_seconds
        rate = spec.batch.size / (f.compute_seconds + exchange)
        fits, least = "yes" if f.fits else "no", f.least_gpus or "none"
        lines.append(
            f"{f.gpu:5}  {fits:4}  {_seconds(f.compute_seconds):>12}  {_seconds(exchange):>13}  {rate:9.3g}  {least}"
        )
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def main() -> None:
    """Run the command line; errors meant for users are printed as sentences, with exit code 1."""
    try:
        sfm()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("sfm", "service"):
            raise
        extra = "service" if error.name.split(".")[0] in _SERVICE else "survey"
        click.echo(
            f"error: this command needs {error.name}, which is not installed; pip install 'sfm[{extra}]'", err=True
        )
        sys.exit(1)
    except SfmError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
