"""One gradient: every engine at any degree and accumulation takes the steps of one plain process, also across a resume."""

import traceback
from functools import cache
from typing import get_args

import numpy as np
import pytest
import torch

from sfm.feed.order import RankOrder
from sfm.model.mae import MaskedAutoencoder
from sfm.model.masking import draw_mask
from sfm.parallel.context import attends
from sfm.parallel.engines import Resume, build_engine
from sfm.parallel.mesh import build_mesh
from sfm.plan.shares import slab_rows
from sfm.spec import Engine, parse_spec
from sfm.train.schedule import learning_rate
from sfm.train.step import MicroBatch, run_step
from tests.distributed import run_ranks

STEPS, FEW = 20, 8

GATHER, RING, ULYSSES = ({"context_mode": mode} for mode in ("gather", "ring", "ulysses"))
MODES = {  # of each context degree, dealt out to the engines in their order
    1: [GATHER],
    2: [GATHER, RING, ULYSSES],
    3: [GATHER, RING],
    4: [{"context_mode": "hybrid", "ulysses": 2}, ULYSSES, RING, GATHER],
}


def spec_of(workers, context, engine, micro, precision="fp32"):
    mode = MODES.get(context, MODES[1])[get_args(Engine).index(engine) % len(MODES.get(context, MODES[1]))]
    return parse_spec(
        {
            "surveys": [{"url": "unused"}],
            "window": {"shape": [20, 8, 16]},
            "model": {
                "preset": "tiny",
                "patch": [4, 4, 4],
                "encoder": {"width": 48, "depth": 2, "heads": 4, "mlp": 96},
                "decoder": {"width": 24, "depth": 1, "heads": 4, "mlp": 48},
                "positions": "rope",
            },
            "mask": {"ratio": 0.6},
            "batch": {"size": 6, "micro": micro},
            "parallel": {"workers": workers, "context": context, "engine": engine, **mode},
            "precision": precision,
            "optimiser": {"lr": 1e-2, "warmup_steps": 2},
            "steps": STEPS,
        }
    )


ORACLE = (1, 1, "ddp", 6)  # the whole batch at once, never interrupted
EQUAL = [  # (workers, context, engine, samples of a micro-batch)
    (workers, context, engine, 6 * context // workers // accumulation)
    for workers, context in ((2, 1), (4, 2), (4, 4))
    for accumulation in (1, 3)
    for engine in get_args(Engine)
]
EQUAL += [(1, 1, "zero2", 2), (1, 1, "fsdp2", 2), (3, 3, "zero3", 2), (3, 3, "fsdp2", 2)]  # one process; odd shares
CLOSE = [(2, 2, engine, 6, "bf16") for engine in ("zero2", "fsdp2")] + [(2, 2, "ddp", 3, "bf16")]


@cache
def results_at(workers):
    """What each rank found, per configuration of so many workers: [rank][configuration]. One start serves them all."""
    return run_ranks(run_all, workers, [c for c in (ORACLE, *EQUAL, *CLOSE) if c[0] == workers])


def steps_in(configuration):
    """All of them where four context ranks accumulate three micro-batches; a few say as much of the others."""
    _, context, _, micro, *_ = configuration
    return STEPS if configuration == ORACLE or (context, micro) == (4, 2) else FEW


def run_all(configurations):
    """(loss, gradient norm) of each step, or where it failed, per configuration; what comes after a failure is not run."""
    results, failure = {}, None
    for configuration in configurations:
        if failure is None:
            print(configuration, flush=True)  # for a process that does not live to tell
            try:
                steps = steps_in(configuration)
                resume_at = None if configuration == ORACLE else steps // 2
                results[configuration] = take_steps(spec_of(*configuration), resume_at, steps)
                continue
            except Exception:  # noqa: BLE001 (the test of this configuration shows it)
                results[configuration] = traceback.format_exc()
                failure = f"not run, as {configuration} failed before it"
        else:
            results[configuration] = failure
    return results


def steps_of(configuration):
    """[step, (loss, gradient norm)] of a configuration, which all its ranks agree on."""
    ranks = [rank[configuration] for rank in results_at(configuration[0])]
    for rank, found in enumerate(ranks):
        assert not isinstance(found, str), f"{configuration} on rank {rank}: {found}"
    assert all(found == ranks[0] for found in ranks)
    return np.array(ranks[0])


def take_steps(spec, resume_at, steps=STEPS):
    """(loss, gradient norm) of each step on this rank; at `resume_at` all is thrown away but the saved state."""
    engine = build_engine(MaskedAutoencoder.from_spec(spec), spec)
    if resume_at is None:
        return steps_with(engine, spec, 0, steps)
    first = steps_with(engine, spec, 0, resume_at)
    saved = engine.state()
    for name, weight in saved["weights"].items():
        assert not torch.equal(weight, weight.bfloat16().float()), f"{name} was kept in bf16"
    engine = build_engine(MaskedAutoencoder.from_spec(spec), spec, Resume(saved, resume_at))
    return first + steps_with(engine, spec, resume_at, steps)


def steps_with(engine, spec, first, end):
    """(loss, gradient norm) of the steps from `first` to `end`; now and then the model predicts, as in an evaluation."""
    mesh = build_mesh(spec.parallel.context, spec.parallel.ulysses)
    attend = attends(mesh, spec)
    both = {"attend_encoder": attend.encoder, "attend_decoder": attend.decoder}
    rows = slab_rows(spec.grid[0], mesh.context, mesh.context_rank)
    order, results = RankOrder.of(spec, mesh.data_rank), []
    for step in range(first, end):
        start = step * order.per_step
        micro = [
            micro_batch(spec, [order.sample(p) for p in range(at, at + spec.micro_batch)], rows)
            for at in range(start, start + order.per_step, spec.micro_batch)
        ]
        result = run_step(
            engine, micro, learning_rate(step, spec.steps, spec.optimiser), spec.model.patch, attend, rows.start
        )
        results.append((result.loss, result.grad_norm))
        if step % 4 == 1:
            engine.model.eval()
            with torch.no_grad():
                engine.model(*micro[0], first_row=rows.start, predict=True, **both)
            engine.model.train()
    return results


def micro_batch(spec, indices, rows):
    voxels, masks = [], []
    for index in indices:
        window = np.random.default_rng(index).normal(size=spec.window.shape).astype(np.float32)
        window[:, : 1 + index % 4] = np.nan  # every sample has another count of live voxels
        voxels.append(window[rows.start * 4 : rows.stop * 4])
        masks.append(draw_mask(spec.grid, spec.mask_ratio, 0, index, rows))
    visible, masked = (torch.from_numpy(np.stack(part)) for part in zip(*masks, strict=True))
    return MicroBatch(torch.from_numpy(np.stack(voxels)), visible, masked)


@pytest.mark.parametrize(("workers", "context", "engine", "micro"), EQUAL)
def test_losses_and_gradient_norms_equal_one_process(workers, context, engine, micro):
    found = steps_of((workers, context, engine, micro))
    assert len(found) == steps_in((workers, context, engine, micro))
    np.testing.assert_allclose(found, steps_of(ORACLE)[: len(found)], rtol=1e-5)


@pytest.mark.parametrize("configuration", CLOSE, ids=lambda c: c[2])
def test_bf16_stays_close_and_is_not_fp32(configuration):
    found = steps_of(configuration)[:, 0]
    exact = steps_of(ORACLE)[: len(found), 0]
    assert 1e-6 < np.abs(found / exact - 1).max() < 1e-2


def save_and_go_on(spec, path):
    """Save the state after half of the steps; the results of the rest."""
    engine = build_engine(MaskedAutoencoder.from_spec(spec), spec)
    steps_with(engine, spec, 0, STEPS // 2)
    state = engine.state()
    if build_mesh(1).rank == 0:
        torch.save(state, path)
    return steps_with(engine, spec, STEPS // 2, STEPS)


def load_and_go_on(spec, path):
    engine = build_engine(MaskedAutoencoder.from_spec(spec), spec, Resume(torch.load(path), STEPS // 2))
    return steps_with(engine, spec, STEPS // 2, STEPS)


@pytest.fixture(scope="module")
def zero2(tmp_path_factory):
    """State that ZeRO-2 saved at two workers, and the steps it then took."""
    path = tmp_path_factory.mktemp("state") / "saved"
    return path, np.array(run_ranks(save_and_go_on, 2, spec_of(2, 1, "zero2", 3), path)[0])


@pytest.mark.parametrize(("workers", "context", "engine"), [(3, 3, "fsdp2"), (1, 1, "ddp"), (2, 1, "zero3")])
def test_another_engine_at_another_size_continues(zero2, workers, context, engine):
    path, expected = zero2
    found = np.array(run_ranks(load_and_go_on, workers, spec_of(workers, context, engine, 3), path)[0])
    np.testing.assert_allclose(found[0, 0], expected[0, 0], rtol=1e-6)  # the weights
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # the moments


def whole_and_resumed(specs):
    return [(take_steps(spec, None), take_steps(spec, STEPS // 2)) for spec in specs]


def test_resume_at_the_same_size_is_equal_to_the_last_bit():
    engines = ("zero2", "zero3", "fsdp2", "ddp")
    specs = [spec_of(2, 2, engine, 2) for engine in engines] + [spec_of(2, 1, "zero2", 1, "bf16")]
    for rank in run_ranks(whole_and_resumed, 2, specs):
        for spec, (whole, resumed) in zip(specs, rank, strict=True):
            assert whole == resumed, f"{spec.parallel.engine}, {spec.precision}"
