"""Registers under every engine: also where a rank holds none of them, and where they are fewer than the ranks that shard them."""

import pytest
import torch

from sfm.model.mae import MaskedAutoencoder
from sfm.parallel.context import attends
from sfm.parallel.engines import build_engine
from sfm.parallel.mesh import build_mesh
from sfm.plan.shares import shares, slab_rows
from sfm.spec import Batch, Parallel
from sfm.train.step import MicroBatch, run_step
from tests.distributed import run_ranks
from tests.model.slabs import slab, spec_of


def spec_with(workers, engine, mode="gather", **model):
    parallel = Parallel(workers=workers, context=workers, engine=engine, context_mode=mode)
    size = {"width": 36, "depth": 1, "heads": 3, "mlp": 50}
    spec = spec_of(5, registers=2, positions="rope", encoder=size, decoder=size, **model)
    return spec.model_copy(update={"parallel": parallel, "batch": Batch(size=2)})


def train(specs):
    """For each spec: losses and gradient norms of three steps, and the registers after them."""
    results = []
    for spec in specs:
        mesh = build_mesh(spec.parallel.context)
        rows = slab_rows(spec.grid[0], mesh.context, mesh.context_rank)
        voxels, *masks = slab(spec, rows)
        engine = build_engine(MaskedAutoencoder.from_spec(spec), spec)
        attend, batch = attends(mesh, spec), MicroBatch(voxels.float(), *masks)
        steps = [run_step(engine, [batch], 1e-2, spec.model.patch, attend, rows.start) for _ in range(3)]
        results.append(([*map(tuple, steps)], engine.state()["weights"]["registers"].clone()))
    return results


def test_every_engine_trains_them_as_one_process_does():
    cross = {"decoder_attention": "cross", "decode_share": 0.5}
    engines = ["ddp", "zero1", "zero2", "zero3", "fsdp2"]
    specs = [spec_with(3, engine) for engine in engines] + [spec_with(3, "zero2", "ulysses", **cross)]
    assert [len(own) for own in shares(specs[0]).registers] == [0, 1, 1]
    alone, across = run_ranks(train, 1, [spec_with(1, "ddp"), spec_with(1, "ddp", **cross)])[0]
    drawn = MaskedAutoencoder.from_spec(specs[0]).registers
    for rank in run_ranks(train, 3, specs):
        for found, (steps, registers) in zip(rank, [alone] * len(engines) + [across], strict=True):
            assert found[0] == [pytest.approx(step, rel=1e-5) for step in steps]
            torch.testing.assert_close(found[1], registers, rtol=1e-4, atol=1e-6)
            assert (registers - drawn).abs().min() > 1e-4  # all of them were trained
