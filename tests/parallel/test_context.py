"""Context parallelism is invisible: outputs and gradients of any degree equal those of one process."""

import math

import numpy as np
import pytest
import torch

from sfm.model.mae import MaskedAutoencoder
from sfm.model.masking import draw_mask
from sfm.parallel.context import GatherAttend, attends
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
                "encoder": {"width": 36, "depth": 2, "heads": 3, "mlp": 50},
                "decoder": {"width": 24, "depth": 2, "heads": 2, "mlp": 30},
                "positions": positions,
            },
            "mask": {"ratio": 0.55},
        }
    )


def loss_and_gradients(spec, context):
    """On every rank: loss and parameter gradients of one batch, in fp64, summed over the slabs."""
    mesh = build_mesh(context)
    rows = slab_rows(spec.grid[0], mesh.context, mesh.context_rank)
    voxels = np.random.default_rng(3).normal(size=(2, *spec.window.shape))
    voxels[:, 2, 4, :] = np.nan
    thickness = spec.model.patch[0]
    slab = torch.from_numpy(voxels[:, rows.start * thickness : rows.stop * thickness])
    masks = [draw_mask(spec.grid, spec.mask.ratio, 0, index, rows) for index in range(2)]
    visible, masked = (torch.from_numpy(np.stack(part)) for part in zip(*masks, strict=True))
    model = MaskedAutoencoder.from_spec(spec).double()
    attend = attends(mesh, spec.grid, spec.mask.ratio)
    loss = model(
        slab, visible, masked, first_row=rows.start, attend_encoder=attend.encoder, attend_decoder=attend.decoder
    )
    loss.backward()
    parts = [loss.detach(), *(p.grad for p in model.parameters())]
    for part in parts:
        if mesh.context > 1:
            torch.distributed.all_reduce(part)
    return parts


def alone(spec):
    return run_ranks(loss_and_gradients, 1, spec, 1)[0]


@pytest.mark.parametrize(("rows", "degree", "positions"), [(4, 2, "sincos"), (5, 2, "rope"), (5, 3, "sincos")])
def test_loss_and_every_gradient_equal_one_process(rows, degree, positions):
    spec = spec_of(rows, positions)
    expected = alone(spec)
    for parts in run_ranks(loss_and_gradients, degree, spec, degree):
        for part, right in zip(parts, expected, strict=True):
            torch.testing.assert_close(part, right, rtol=1e-10, atol=1e-11)


def attention(lengths):
    """This rank's output and input gradients of one attention over uneven shards, against all tokens at once."""
    rank, total = torch.distributed.get_rank(), sum(lengths)
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (torch.randn(2, 3, total, 8, dtype=torch.float64, generator=generator) for _ in range(4))
    own = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    mine = [t[:, :, own].clone().requires_grad_() for t in (q, k, v)]
    out = GatherAttend(torch.distributed.group.WORLD, lengths)(*mine)
    (out * weight[:, :, own]).sum().backward()
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    scores = whole[0] @ whole[1].mT / math.sqrt(8)
    expected = torch.softmax(scores, -1) @ whole[2]
    (expected * weight).sum().backward()
    torch.testing.assert_close(out, expected[:, :, own], rtol=1e-10, atol=1e-12)
    for one, all_tokens in zip(mine, whole, strict=True):
        torch.testing.assert_close(one.grad, all_tokens.grad[:, :, own], rtol=1e-10, atol=1e-12)
    return True


@pytest.mark.parametrize("lengths", [[7, 6], [1, 11], [5, 1, 7]])
def test_gathered_attention_equals_the_formula_over_uneven_shards(lengths):
    assert all(run_ranks(attention, len(lengths), lengths))


def test_slabs_cover_the_rows_evenly():
    for rows in range(1, 30):
        for degree in range(1, rows + 1):
            slabs = [slab_rows(rows, degree, rank) for rank in range(degree)]
            assert [row for slab in slabs for row in slab] == list(range(rows))
            assert max(map(len, slabs)) - min(map(len, slabs)) <= 1
