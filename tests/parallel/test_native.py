"""PyTorch's own context parallelism behind our door; on CPUs, where it has no kernels, by its plain formula."""

import pytest
import torch

from sfm.spec import Mask, Parallel
from tests.distributed import run_ranks
from tests.model.slabs import loss_and_gradients, over_slabs, spec_of
from tests.parallel.test_context import CROSS, every_attention


@pytest.mark.parametrize("world", [2, 4])
def test_outputs_and_input_gradients_equal_the_formula(world):
    cases = [([queries] * world, [5] * world, "torch", 1, torch.float64) for queries in (5, 3)]
    for rank in run_ranks(every_attention, world, cases):
        for case in rank:
            for ours, _, right in case:
                assert ours <= 1e-20 * right  # squares


@pytest.mark.parametrize("world", [2, 4])
def test_loss_and_every_gradient_equal_one_process(world):
    """Also where blocks, and what they exchange, are computed again in the backward pass."""
    job = spec_of(2 * world, registers=world, positions="rope")
    shared = {
        "mask": Mask(ratio=0.55, even=True),
        "parallel": Parallel(workers=world, context=world, context_mode="torch"),  # which a spec refuses for CPUs
    }
    specs = [
        job.model_copy(update={**shared, "model": job.model.model_copy(update=fields)})
        for fields in ({}, CROSS, {"checkpoint_activations": True})
    ]
    expected = [loss_and_gradients(spec) for spec in specs]
    for found in run_ranks(over_slabs, world, specs):
        for parts, whole in zip(found, expected, strict=True):
            for part, right in zip(parts, whole, strict=True):
                torch.testing.assert_close(part, right, rtol=1e-10, atol=1e-11)
