"""What a forecast says of the busiest device."""

import pytest

from sfm import plan
from sfm.plan.machines import GPUS
from sfm.spec import parse_spec


def job(workers, context, rows=8):
    return parse_spec(
        {
            "surveys": [{"url": "unused"}],
            "window": {"shape": [16 * rows, 128, 128]},
            "batch": {"size": workers // context, "micro": 1},
            "parallel": {"workers": workers, "context": context, "context_mode": "ring"},
            "precision": "bf16",
        }
    )


@pytest.mark.parametrize(("context", "share"), [(2, 1 / 2), (5, 2 / 8), (7, 2 / 8), (8, 1 / 8)])
def test_the_thickest_slab_sets_the_pace(context, share):
    alone, shared = (plan.forecast(job(c, c), "H200").compute_seconds for c in (1, context))
    assert shared == pytest.approx(share * alone)


@pytest.mark.parametrize(("workers", "context", "inside"), [(8, 8, True), (16, 8, True), (6, 6, True), (24, 6, False)])
def test_groups_that_reach_beyond_a_machine_use_its_network(workers, context, inside):
    found, chip = plan.forecast(job(workers, context), "H200"), GPUS["H200"]
    assert found.context_seconds == found.context_bytes / (chip.link if inside else chip.network)
    assert found.engine_seconds == found.engine_bytes / (chip.link if workers <= 8 else chip.network)


def test_the_fewest_devices_hold_the_job_and_one_fewer_does_not():
    spec = job(1, 1)
    needed = [plan.memory(job(c, c)).total for c in range(1, 9)]
    assert plan.outlook.least_devices(spec, needed[0]) == 1
    assert plan.outlook.least_devices(spec, min(needed)) > 1
    assert plan.outlook.least_devices(spec, 1e6) is None
