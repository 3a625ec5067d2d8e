"""`python -m sfm.train --config job.yaml`: what every door runs, on a cluster or alone."""

from __future__ import annotations

import logging
import os
import sys

import click

from sfm import plan
from sfm.spec import SfmError, load_spec


@click.command()
@click.option("--config", required=True, type=click.Path(), help="Job spec, YAML or JSON.")
def main(config: str) -> None:
    """Train by a job spec: in the Ray cluster of this environment, else in one started here."""
    try:
        _run(config)
    except SfmError as error:
        for line in str(error).splitlines():
            click.echo(f"error: {line}", err=True)
        sys.exit(1)


def _run(config: str) -> None:
    spec = load_spec(config)
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines of different ranks look alike and all matter

    # Ray and torch take seconds to import: a bad spec is refused before.
    import ray

    from sfm.train.driver import absolute, run

    spec = absolute(spec)
    quiet = {"logging_level": logging.WARNING}
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:
        need = plan.request(spec)
        # Logical CPUs: Ray counts them and does not pin them. A few more for what Ray itself schedules.
        ray.init(num_cpus=max(os.cpu_count() or 1, int(need.cpus) + 2), include_dashboard=False, **quiet)
    run(spec)


if __name__ == "__main__":
    main()
