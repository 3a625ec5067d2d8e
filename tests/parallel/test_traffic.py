"""What each mode sends is what the formula says: the operations of real processes, counted where torch dispatches them."""

import pytest
import torch

from sfm import plan
from sfm.model.mae import MaskedAutoencoder
from sfm.parallel.context import attend_across, attends
from sfm.parallel.mesh import build_mesh
from sfm.plan.shares import slab_rows
from sfm.plan.traffic import attention_traffic
from sfm.spec import Batch
from tests.distributed import run_ranks
from tests.model.slabs import slab, spec_of
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


def whole_model(specs):
    """Bytes this rank sends in a forward and backward pass of each spec's model, micro-batch by micro-batch."""
    sent = []
    for spec in specs:
        mesh = build_mesh(spec.parallel.context, spec.parallel.ulysses)
        rows = slab_rows(spec.grid[0], mesh.context, mesh.context_rank)
        attend, model = attends(mesh, spec), MaskedAutoencoder.from_spec(spec)
        with Counter() as counter:
            for _ in range(spec.accumulation):
                voxels, visible, masked = slab(spec, rows)
                model(
                    voxels.float(),
                    visible,
                    masked,
                    first_row=rows.start,
                    attend_encoder=attend.encoder,
                    attend_decoder=attend.decoder,
                    registers=attend.registers,
                ).backward()
        sent.append(sum(counter.bytes))
    return sent


@pytest.mark.parametrize("world", [2, 4])
def test_the_plan_counts_what_the_whole_model_sends(world):
    sizes = {
        "encoder": {"width": 48, "depth": 3, "heads": 4, "mlp": 50},
        "decoder": {"width": 32, "depth": 2, "heads": 4, "mlp": 30},
    }
    modes = [{"context_mode": mode} for mode in ("gather", "ring", "ulysses")]
    modes += [{"context_mode": "hybrid", "ulysses": 2}] if world == 4 else []
    models = [{}, {"checkpoint_activations": True, "registers": 3}, {"decoder_attention": "cross", "decode_share": 0.3}]
    specs = []
    for mode in modes:
        for model in models:
            spec = spec_of(5, {"workers": world, "context": world, **mode}, **sizes, **model)
            # two micro-batches of the two windows that `slab` makes
            specs.append(spec.model_copy(update={"batch": Batch(size=4, micro=2)}))
    ranks = run_ranks(whole_model, world, specs)
    for number, spec in enumerate(specs):
        assert [sent[number] for sent in ranks] == plan.context_traffic(spec), (spec.parallel, spec.model)
