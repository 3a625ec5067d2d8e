"""The predicted memory of a step against the bytes of tensors that are alive while it runs, on real processes."""

from typing import get_args

import numpy as np
import pytest
import torch

from sfm import plan
from sfm.model import blocks, mae
from sfm.model.mae import MaskedAutoencoder
from sfm.model.masking import draw_mask
from sfm.parallel.context import attends
from sfm.parallel.engines import build_engine
from sfm.parallel.mesh import build_mesh
from sfm.plan import footprint
from sfm.plan.shares import shares, slab_rows
from sfm.spec import Engine, parse_spec
from sfm.train.step import MicroBatch, run_step
from tests.distributed import run_ranks
from tests.live import LiveBytes

ROPE = {"positions": "rope"}
MODELS = [
    {},
    ROPE,
    {**ROPE, "qk_norm": True, "registers": 3},
    {**ROPE, "checkpoint_activations": True},
    {**ROPE, "checkpoint_activations": True, "keep_attention": True},
    {**ROPE, "decoder_attention": "cross", "decode_share": 0.5},
]


def spec_of(world, mode, model, rows=16, micro=1, precision="fp32"):
    sizes = {
        "encoder": {"width": 96, "depth": 3, "heads": 4, "mlp": 384},
        "decoder": {"width": 48, "depth": 2, "heads": 4, "mlp": 192},
    }
    parallel = {"workers": world, "context": world, "context_mode": mode, "ulysses": 2 if mode == "hybrid" else 1}
    return parse_spec(
        {
            "surveys": [{"url": "unused"}],
            "window": {"shape": [4 * rows, 64, 64]},
            "model": {"preset": "tiny", "patch": [4, 4, 4], **sizes, **model},
            "batch": {"size": micro},
            "precision": precision,
            "parallel": {**parallel, "engine": "ddp"},
        }
    )


def peaks(specs):
    """Bytes alive at the peak of a forward and backward pass on this rank, windows and weights not among them."""
    found = []
    for spec in specs:
        mesh = build_mesh(spec.parallel.context, spec.parallel.ulysses)
        attend = attends(mesh, spec)
        rows = slab_rows(spec.grid[0], mesh.context, mesh.context_rank)
        model = MaskedAutoencoder.from_spec(spec)
        batch = spec.micro_batch
        masks = draw_mask(spec.grid, spec.mask_ratio, 0, 0, rows, spec.model.decode_share)
        tokens = [torch.from_numpy(part).expand(batch, -1).clone() for part in masks]
        voxels = torch.randn(batch, len(rows) * spec.model.patch[0], *spec.window.shape[1:])
        with LiveBytes() as live:
            loss = model(
                voxels,
                *tokens,
                first_row=rows.start,
                attend_encoder=attend.encoder,
                attend_decoder=attend.decoder,
                registers=attend.registers,
            )
            loss.backward()
        found.append(live.peak)
    return found


def assert_close(specs, ranks):
    for n, spec in enumerate(specs):
        measured = max(found[n] for found in ranks)
        windows = spec.micro_batch * max(shares(spec).voxels) * 4
        predicted = plan.memory(spec).activations - windows
        assert predicted == pytest.approx(measured, rel=0.1), f"{spec.parallel}, {spec.model}, {spec.micro_batch}"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_activations_at_the_peak_are_within_a_tenth_of_the_formula(world):
    modes = {1: ["gather"], 2: ["gather", "ring", "ulysses"], 4: ["gather", "ring", "ulysses", "hybrid"]}[world]
    specs = [
        spec_of(world, mode, model)
        for mode in modes
        for model in MODELS
        if not (model.get("keep_attention") and mode in ("ring", "hybrid"))
    ]
    specs += [spec_of(world, mode, ROPE, rows=13, micro=2) for mode in modes]  # slabs of different thickness
    assert_close(specs, run_ranks(peaks, world, specs))


def peaks_in_tiles(specs):
    """`peaks`, and what is predicted, with tiles that these short sequences fill several times."""
    mae.HEAD_TILE = footprint.HEAD_TILE = 256
    blocks.HIDDEN_TILE = footprint.HIDDEN_TILE = 512
    return peaks(specs), [plan.memory(spec).activations for spec in specs]


def test_tiles_of_long_sequences_are_counted():
    specs = [spec_of(1, "gather", {**ROPE, "checkpoint_activations": again}) for again in (False, True)]
    ((measured, predicted),) = run_ranks(peaks_in_tiles, 1, specs)
    for spec, found, formula in zip(specs, measured, predicted, strict=True):
        assert formula - shares(spec).voxels[0] * 4 == pytest.approx(found, rel=0.1), spec.model
    assert predicted[1] < plan.memory(specs[1]).activations


def whole_steps(specs):
    """Bytes alive at the peak of the second step of each spec, weights and windows among them."""
    found = []
    for spec in specs:
        mesh = build_mesh(1)
        with LiveBytes() as live:
            engine = build_engine(MaskedAutoencoder.from_spec(spec), spec)
            tokens = [torch.from_numpy(part)[None] for part in draw_mask(spec.grid, spec.mask_ratio, 0, 0)]
            batches = [MicroBatch(torch.randn(1, *spec.window.shape), *tokens) for _ in range(spec.accumulation)]
            for _ in range(2):
                live.peak = 0
                run_step(engine, batches, 1e-4, spec.model.patch, attends(mesh, spec), 0)
        found.append(live.peak)
        del engine
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_what_engines_hold_is_close_to_the_table(world):
    base = {
        "surveys": [{"url": "unused"}],
        "window": {"shape": [32, 32, 32]},
        "model": {"preset": "tiny", "patch": [8, 8, 8], "encoder": {"width": 192, "depth": 6, "heads": 3, "mlp": 768}},
    }
    specs = [
        parse_spec(
            {
                **base,
                "batch": {"size": world * accumulation, "micro": 1},
                "parallel": {"workers": world, "engine": engine},
                "precision": precision,
            }
        )
        for engine in get_args(Engine)
        for precision in ("fp32", "bf16")
        for accumulation in (1, 2)
    ]
    measured = np.max(run_ranks(whole_steps, world, specs), axis=0)
    for spec, found in zip(specs, measured, strict=True):
        assert plan.memory(spec).total == pytest.approx(found, rel=0.15), (spec.parallel.engine, spec.precision)


def test_context_parallelism_shares_activations():
    def activations(context):
        job = {
            "surveys": [{"url": "unused"}],
            "parallel": {"workers": context, "context": context},
            "batch": {"size": 1},
        }
        return plan.memory(parse_spec(job)).activations

    assert activations(8) < activations(4) < activations(2) < activations(1)
