"""`python -m sfm.train --config job.yaml`: what every door runs, on a cluster or alone."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import click

from sfm import plan
from sfm.spec import SfmError, absolute, load_spec


@click.command()
@click.option("--config", required=True, type=click.Path(), help="Job spec, YAML or JSON.")
def main(config: str) -> None:
    """Train by a job spec: in the Ray cluster at RAY_ADDRESS, else in one started here for it alone."""
    try:
        _run(config)
    except SfmError as error:
        for line in str(error).splitlines():
            click.echo(f"error: {line}", err=True)
        sys.exit(1)


def _run(config: str) -> None:
    spec = load_spec(config)
    spec = absolute(spec.model_copy(update={"output": spec.output or f"runs/{spec.name}"}), Path.cwd())
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines of different ranks look alike and all matter
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it makes every printed line appear twice

    # Ray and torch take seconds to import: a bad spec is refused before.
    import ray

    from sfm.train.driver import run

    need = plan.request(spec)
    address = os.environ.get("RAY_ADDRESS")  # set by Ray's job API, or by the user
    if address:
        # Ray's own helpers look for the cluster afresh, and fail where two run on a machine.
        ray.init(runtime_env={"env_vars": {"RAY_ADDRESS": address}}, logging_level=logging.WARNING)
    else:
        # Logical CPUs: Ray counts them and does not pin them. A few more for what Ray itself schedules.
        cpus = max(os.cpu_count() or 1, int(need.cpus) + 2)
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.WARNING)
    run(spec)


if __name__ == "__main__":
    main()
