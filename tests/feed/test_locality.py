"""Two nodes of one machine: a reader lives on the node of its rank as long as there is room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sfm.feed import ray_data
from sfm.feed.order import RankOrder
from sfm.spec import JobSpec, parse_spec
from sfm.survey.mdio import open_survey
from sfm.survey.statistics import estimate
from tests.survey.conftest import write_v1

ROOMY, FULL = 3, 1  # CPUs


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[int, str]]:
    """Identities of the nodes, by their CPUs."""
    cluster = Cluster()
    try:
        for cpus in (ROOMY, FULL):
            cluster.add_node(num_cpus=cpus, include_dashboard=False, object_store_memory=100 * 2**20)
        ray.init(address=cluster.address)
        yield {int(node["Resources"]["CPU"]): node["NodeID"] for node in ray.nodes()}
    finally:
        ray.shutdown()
        cluster.shutdown()


def rank(spec: dict[str, Any], statistics: list[dict[str, Any]], said: str) -> None:
    """Runs on the node of a rank: asks for one micro-batch of a reader that says where it is."""

    class Telling(ray_data._Reader):
        def __init__(self, *arguments: Any) -> None:
            Path(said).write_text(ray.get_runtime_context().get_node_id())
            super().__init__(*arguments)

    ray_data._Reader = Telling  # type: ignore[misc]
    job = JobSpec.model_validate(spec)
    batches = ray_data.ray_feed(job, statistics, range(job.grid[0]), RankOrder.of(job, 0), 0, 8)
    next(batches)
    batches.close()


@pytest.mark.parametrize(("cpus", "expected"), [(ROOMY, ROOMY), (FULL, ROOMY)], ids=["beside", "elsewhere if full"])
def test_a_reader_lives_where_its_rank_does(nodes: dict[int, str], tmp_path: Path, cpus: int, expected: int) -> None:
    url = write_v1(tmp_path / "s.mdio", np.random.default_rng(0).standard_normal((16, 16, 32)).astype("f4"))
    spec = parse_spec(
        {
            "surveys": [{"url": url}],
            "window": {"shape": [8, 8, 16]},
            "model": {"preset": "tiny", "patch": [4, 4, 8]},
            "batch": {"size": 4},
            "resources": {"reader_cpus": 1, "ahead_mib": 8},
        }
    )
    statistics = [estimate(open_survey(url), spec.window.clip, spec.seed).to_json()]
    said = tmp_path / "said"
    place = NodeAffinitySchedulingStrategy(nodes[cpus], soft=False)
    task = ray.remote(rank).options(num_cpus=1, scheduling_strategy=place)
    ray.get(task.remote(spec.model_dump(mode="json"), statistics, str(said)), timeout=120)
    assert said.read_text() == nodes[expected]
