"""What each mode sends is what the formula says: the operations of real processes, counted where torch dispatches them."""

import pytest
import torch

from sfm.parallel.context import attend_across
from sfm.parallel.mesh import build_mesh
from sfm.plan.traffic import attention_traffic
from tests.distributed import run_ranks
from tests.traffic import Counter

BATCH, HEADS, CHANNELS = 2, 12, 4


def count(cases):
    """For each (mode, ulysses, keys, queries, dtype): this rank's operations, bytes forward, and bytes backward."""
    counts = []
    for mode, ulysses, keys, queries, dtype in cases:
        mesh = build_mesh(len(keys), ulysses)
        lengths = [of[mesh.context_rank] for of in (queries, keys, keys)]
        q, k, v = (torch.randn(BATCH, HEADS, n, CHANNELS, dtype=dtype, requires_grad=True) for n in lengths)
        attend = attend_across(mesh, keys, mode, queries)
        with Counter() as counter:
            out = attend(q, k, v)
            counter.bytes.append(0)
            out.sum().backward()
        counts.append((counter.operations, *counter.bytes))
    return counts


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_mode_sends_what_the_formula_says(world):
    even, odd, other = [6] * world, [7, 1, 11, 4][:world], [3, 9, 2, 5][:world]
    cases = [
        (mode, ulysses, keys, queries, dtype)
        for mode, ulysses in [("gather", 1), ("ring", 1), ("ulysses", 1), ("hybrid", 2)]
        for keys, queries in [(even, even), (odd, odd), (odd, other)]
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
        if mode != "hybrid" or world == 4
    ]
    for rank, counts in enumerate(run_ranks(count, world, cases)):
        for (mode, ulysses, keys, queries, dtype), found in zip(cases, counts, strict=True):
            width = BATCH * HEADS * CHANNELS
            formula = attention_traffic(mode, keys, rank, width, dtype.itemsize, ulysses, queries)
            assert found == formula, (mode, keys, queries, dtype, rank)


def test_one_rank_sends_nothing():
    assert attention_traffic("gather", [9], 0, 64, 4) == (0, 0, 0)
