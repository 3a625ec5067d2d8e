"""`python -m sfm.train --config job.yaml`: what every door runs, on a cluster or alone."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import click

from sfm.spec import SfmError, absolute, load_spec


@click.command()
@click.option("--config", required=True, type=click.Path(), help="Job spec, YAML or JSON.")
def main(config: str) -> None:
    """Train by a job spec: in the Ray cluster at RAY_ADDRESS, else in one started here for it alone."""
    try:
        _run(config)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "sfm":
            raise
        click.echo(
            f"error: training needs {error.name}, which is not installed here; pip install 'sfm[train]'", err=True
        )
        sys.exit(1)
    except SfmError as error:
        for line in str(error).splitlines():
            click.echo(f"error: {line}", err=True)
        sys.exit(1)


def _run(config: str) -> None:
    spec = load_spec(config)
    spec = absolute(spec.model_copy(update={"output": spec.output or f"runs/{spec.name}"}), Path.cwd())
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines of different ranks look alike and all matter
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it makes every printed line appear twice

    # A bad job is refused before Ray and torch, which take seconds, are even imported.
    from sfm import plan
    from sfm.survey import preflight
    from sfm.train import start

    plan.check(spec)
    preflight.check(spec)
    start.check(spec)
    address = os.environ.get("RAY_ADDRESS")  # set by Ray's job API, or by the user
    cpus = int(os.environ.get("SFM_RAY_NUM_CPUS") or max(8, os.cpu_count() or 1))
    if not address and spec.resources.device == "cpu":
        start.check_cluster(spec, {"CPU": cpus})

    import ray

    from sfm.train.driver import run

    try:
        if address:
            # Ray's own helpers look for the cluster afresh, and fail where two run on a machine.
            ray.init(runtime_env={"env_vars": {"RAY_ADDRESS": address}}, logging_level=logging.WARNING)
        else:
            # Logical CPUs: Ray counts them and does not pin them.
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.WARNING)
    except Exception as error:
        where = f"connect to Ray at {address}" if address else "start Ray on this machine"
        raise start.ClusterError(f"cannot {where}: {type(error).__name__}: {error}") from error
    run(spec)


if __name__ == "__main__":
    main()
