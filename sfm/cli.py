"""The command `sfm`: gathers sub-commands from the entry points of group `sfm.commands`."""

from __future__ import annotations

import json
import sys
from importlib.metadata import entry_points

import click

from sfm import plan
from sfm.spec import SfmError, dump_spec, load_spec

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
    """Check a job spec: print it in full, with tokens per sample, parameters and memory per device."""
    spec = load_spec(job)
    memory = plan.memory(spec)
    need = plan.request(spec)
    if as_json:
        figures = {
            "tokens_per_sample": spec.tokens,
            "parameters": plan.parameters(spec),
            "memory_per_device_bytes": {**vars(memory), "total": memory.total},
            "request": vars(need),
        }
        click.echo(json.dumps({"spec": json.loads(spec.model_dump_json()), **figures}))
        return
    click.echo(dump_spec(spec))
    data, context = spec.parallel.data, spec.parallel.context
    parts = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in vars(memory).items())
    click.echo(f"tokens per sample    {spec.tokens:,} = {' x '.join(map(str, spec.grid))}")
    click.echo(f"parameters           {plan.parameters(spec):,}")
    click.echo(f"memory per device    {memory.total / 2**30:.2f} GiB estimated ({parts})")
    click.echo(
        f"workers              {need.workers} = {data} data x {context} context; {spec.accumulation} micro-batches a step"
    )


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
