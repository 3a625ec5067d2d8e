"""Context parallelism is invisible: outputs and gradients of any degree equal those of one process."""

import math

import numpy as np
import pytest
import torch

from sfm.model.mae import MaskedAutoencoder
from sfm.model.masking import draw_mask
from sfm.parallel.context import attend_across, attends
from sfm.parallel.mesh import build_mesh
from sfm.parallel.slab import slab_rows
from sfm.spec import parse_spec
from tests.distributed import run_ranks


def spec_of(rows, positions):
    return parse_spec(
        {
            "surveys": [{"url": "unused"}],
            "window": {"shape": [2 * rows, 9, 10]},
            "model": {
                "preset": "tiny",
                "patch": [2, 3, 2],
                "encoder": {"width": 36, "depth": 2, "heads": 2, "mlp": 50},
                "decoder": {"width": 24, "depth": 2, "heads": 2, "mlp": 30},
                "positions": positions,
            },
            "mask": {"ratio": 0.55},
        }
    )


def loss_and_gradients(spec, context, mode, ulysses):
    """On every rank: loss and parameter gradients of one batch, in fp64, summed over the slabs."""
    mesh = build_mesh(context, ulysses)
    rows = slab_rows(spec.grid[0], mesh.context, mesh.context_rank)
    voxels = np.random.default_rng(3).normal(size=(2, *spec.window.shape))
    voxels[:, 2, 4, :] = np.nan
    thickness = spec.model.patch[0]
    slab = torch.from_numpy(voxels[:, rows.start * thickness : rows.stop * thickness])
    masks = [draw_mask(spec.grid, spec.mask.ratio, 0, index, rows) for index in range(2)]
    visible, masked = (torch.from_numpy(np.stack(part)) for part in zip(*masks, strict=True))
    model = MaskedAutoencoder.from_spec(spec).double()
    attend = attends(mesh, spec.grid, spec.mask.ratio, mode)
    loss = model(
        slab, visible, masked, first_row=rows.start, attend_encoder=attend.encoder, attend_decoder=attend.decoder
    )
    loss.backward()
    parts = [loss.detach(), *(p.grad for p in model.parameters())]
    for part in parts:
        if mesh.context > 1:
            torch.distributed.all_reduce(part)
    return parts


@pytest.mark.parametrize(
    ("rows", "degree", "mode", "ulysses", "positions"),
    [
        (4, 2, "gather", 1, "sincos"),
        (5, 2, "ring", 1, "rope"),
        (5, 2, "ulysses", 1, "sincos"),
        (5, 3, "gather", 1, "rope"),
        (5, 4, "hybrid", 2, "sincos"),
    ],
)
def test_loss_and_every_gradient_equal_one_process(rows, degree, mode, ulysses, positions):
    spec = spec_of(rows, positions)
    expected = run_ranks(loss_and_gradients, 1, spec, 1, "gather", 1)[0]
    for parts in run_ranks(loss_and_gradients, degree, spec, degree, mode, ulysses):
        for part, right in zip(parts, expected, strict=True):
            torch.testing.assert_close(part, right, rtol=1e-10, atol=1e-11)


HEADS = 8
MODES = [("gather", 1), ("ring", 1), ("ulysses", 1), ("hybrid", 2), ("hybrid", 4)]


def every_attention(cases):
    """For each (lengths, mode, ulysses, dtype): squared error of this rank's output and input gradients against the
    formula over all tokens in fp64; the same of one process in that dtype; and the square of what is right."""
    errors = []
    for lengths, mode, ulysses, dtype in cases:
        mesh = build_mesh(len(lengths), ulysses)
        rank, total = mesh.context_rank, sum(lengths)
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(2, HEADS, total, 8, dtype=torch.float64, generator=generator) for _ in range(4)]
        own = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
        q, k, v = (t.to(dtype).double().requires_grad_() for t in whole[:3])
        weight = whole[3].to(dtype)
        exact = torch.softmax(q @ k.mT / math.sqrt(8), -1) @ v
        right = [exact, *torch.autograd.grad((exact * weight.double()).sum(), (q, k, v))]
        mine = [t[:, :, own].detach().to(dtype).requires_grad_() for t in (q, k, v)]
        out = attend_across(mesh, lengths, mode)(*mine)
        found = [out, *torch.autograd.grad((out * weight[:, :, own]).sum(), mine)]
        alone = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        one = torch.nn.functional.scaled_dot_product_attention(*alone)
        plain = [one, *torch.autograd.grad((one * weight).sum(), alone)]
        errors.append(
            [
                [
                    x.square().sum().item()
                    for x in (f.double() - r[:, :, own], (p.double() - r)[:, :, own], r[:, :, own])
                ]
                for f, p, r in zip(found, plain, right, strict=True)
            ]
        )
    return errors


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_every_mode_equals_the_formula_at_odd_lengths(world):
    """Outputs and input gradients: fp64 to 1e-10, fp32 to 1e-5, bf16 at most 1.1 times the error of one process."""
    odd = [[7, 6, 11, 1, 5, 3, 2, 13][:world], [1] * (world - 1) + [17]]
    cases = [
        (lengths, mode, ulysses, dtype)
        for lengths in odd
        for mode, ulysses in MODES
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
        if (mode != "ulysses" or HEADS % world == 0)
        and (mode != "hybrid" or (world % ulysses == 0 and world > ulysses))
    ]
    squares = np.sum(run_ranks(every_attention, world, cases), axis=0)  # [case, tensor, (ours, one process, right)]
    for case, tensors in zip(cases, squares, strict=True):
        for ours, plain, right in np.sqrt(tensors):
            bound = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1.1 * plain / right}[case[3]]
            assert ours / right <= bound, (case, ours / right, plain / right)


def test_slabs_cover_the_rows_evenly():
    for rows in range(1, 30):
        for degree in range(1, rows + 1):
            slabs = [slab_rows(rows, degree, rank) for rank in range(degree)]
            assert [row for slab in slabs for row in slab] == list(range(rows))
            assert max(map(len, slabs)) - min(map(len, slabs)) <= 1
