"""One gradient: every engine at any degree and accumulation takes the steps of one plain process, also across a resume."""

import numpy as np
import pytest
import torch

from sfm.feed.order import RankOrder
from sfm.model.mae import MaskedAutoencoder
from sfm.model.masking import draw_mask
from sfm.parallel.context import attends
from sfm.parallel.engines import Resume, build_engine
from sfm.parallel.mesh import build_mesh
from sfm.parallel.slab import slab_rows
from sfm.spec import parse_spec
from sfm.train.schedule import learning_rate
from sfm.train.step import MicroBatch, run_step
from tests.distributed import run_ranks

STEPS = 10


def spec_of(workers, context, engine, micro, precision="fp32"):
    return parse_spec(
        {
            "surveys": [{"url": "unused"}],
            "window": {"shape": [12, 8, 16]},
            "model": {
                "preset": "tiny",
                "patch": [4, 4, 4],
                "encoder": {"width": 48, "depth": 2, "heads": 3, "mlp": 96},
                "decoder": {"width": 24, "depth": 1, "heads": 3, "mlp": 48},
                "positions": "rope",
            },
            "mask": {"ratio": 0.6},
            "batch": {"size": 4, "micro": micro},
            "parallel": {"workers": workers, "context": context, "engine": engine},
            "precision": precision,
            "optimiser": {"lr": 1e-2, "warmup_steps": 2},
            "steps": STEPS,
        }
    )


def take_steps(spec, resume_at):
    """(loss, gradient norm) of each step on this rank; at `resume_at` all is thrown away but the saved state."""
    mesh = build_mesh(spec.parallel.context)
    attend = attends(mesh, spec.grid, spec.mask.ratio)
    rows = slab_rows(spec.grid[0], mesh.context, mesh.context_rank)
    engine = build_engine(MaskedAutoencoder.from_spec(spec), spec)
    order, results = RankOrder.of(spec, mesh.data_rank), []
    for step in range(spec.steps):
        if step == resume_at:
            saved = engine.state()
            engine = build_engine(MaskedAutoencoder.from_spec(spec), spec, Resume(saved, step))
        start = step * order.per_step
        micro = [
            micro_batch(spec, [order.sample(p) for p in range(at, at + spec.micro_batch)], rows)
            for at in range(start, start + order.per_step, spec.micro_batch)
        ]
        result = run_step(
            engine, micro, learning_rate(step, spec.steps, spec.optimiser), spec.model.patch, attend, rows.start
        )
        results.append((result.loss, result.grad_norm))
    return results


def micro_batch(spec, indices, rows):
    voxels, masks = [], []
    for index in indices:
        window = np.random.default_rng(index).normal(size=spec.window.shape).astype(np.float32)
        window[:, : 1 + index % 4] = np.nan  # every sample has another count of live voxels
        voxels.append(window[rows.start * 4 : rows.stop * 4])
        masks.append(draw_mask(spec.grid, spec.mask.ratio, 0, index, rows))
    visible, masked = (torch.from_numpy(np.stack(part)) for part in zip(*masks, strict=True))
    return MicroBatch(torch.from_numpy(np.stack(voxels)), visible, masked)


@pytest.fixture(scope="module")
def oracle():
    """One plain process, whole batch at once, never interrupted."""
    return np.array(run_ranks(take_steps, 1, spec_of(1, 1, "ddp", 4), None)[0])


@pytest.mark.parametrize(
    ("workers", "context", "engine", "micro"),
    [
        (1, 1, "zero2", 2),
        (2, 1, "zero2", 2),
        (2, 2, "zero2", 4),
        (2, 1, "zero2", 1),
        (2, 2, "zero1", 1),
        (2, 2, "ddp", 2),
        (3, 3, "zero3", 2),
        (4, 2, "zero2", 1),
    ],
)
def test_losses_and_gradient_norms_equal_one_process(oracle, workers, context, engine, micro):
    ranks = run_ranks(take_steps, workers, spec_of(workers, context, engine, micro), STEPS // 2)
    assert all(rank == ranks[0] for rank in ranks)
    np.testing.assert_allclose(ranks[0], oracle, rtol=1e-5)


def test_bf16_stays_close_and_is_not_fp32(oracle):
    found = np.array(run_ranks(take_steps, 2, spec_of(2, 2, "zero2", 4, "bf16"), STEPS // 2)[0])
    difference = np.abs(found[:, 0] / oracle[:, 0] - 1).max()
    assert 1e-6 < difference < 1e-2
