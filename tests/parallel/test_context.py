"""Context parallelism is invisible: outputs and gradients of any degree equal those of one process."""

import math

import numpy as np
import pytest
import torch

from sfm.model.mae import MaskedAutoencoder
from sfm.parallel.context import attend_across, attends
from sfm.parallel.mesh import Mesh, build_mesh
from sfm.plan.shares import slab_rows
from tests.distributed import run_ranks
from tests.model.slabs import loss_and_gradients, over, over_slabs, slab, spec_of


@pytest.mark.parametrize("world", [2, 3, 4, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_loss_and_every_gradient_equal_one_process(world):
    """Every mode with none, one, and more registers than some ranks get; decoders that attend to themselves and across."""
    rows = 2 * world - 1  # slabs of one row and of two
    heads = 4 if world == 2 else world
    sizes = {name: {"width": 6 * heads, "depth": 1, "heads": heads, "mlp": 30} for name in ("encoder", "decoder")}
    modes = [{"context_mode": mode} for mode in ("gather", "ring", "ulysses")]
    modes += [{"context_mode": "hybrid", "ulysses": 2}] if world in (4, 8) else []
    specs = [
        spec_of(rows, {"workers": world, "context": world, **mode}, registers=registers, **sizes, **decoder)
        for mode in modes
        for registers in (0, 1, 5)
        for decoder in ({"positions": "sincos"}, {"positions": "rope", **CROSS})
    ]
    expected = [loss_and_gradients(spec) for spec in specs]
    for found in run_ranks(over_slabs, world, specs):
        for spec, parts, whole in zip(specs, found, expected, strict=True):
            for part, right in zip(parts, whole, strict=True):
                torch.testing.assert_close(part, right, rtol=1e-10, atol=1e-11, msg=lambda m, s=spec: f"{s}\n{m}")


@pytest.mark.parametrize("world", [2, 3, 4, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_gradients_in_fp32_equal_one_process(world):
    """The loss, and all parameter gradients together, to 1e-5 of what fp64 gives."""
    heads = 4 if world == 2 else world
    sizes = {name: {"width": 6 * heads, "depth": 2, "heads": heads, "mlp": 30} for name in ("encoder", "decoder")}
    specs = [
        spec_of(2 * world - 1, {"workers": world, "context": world, "context_mode": mode}, positions="rope", **sizes)
        for mode in ("gather", "ring", "ulysses")
    ]
    exact = torch.cat([part.flatten() for part in loss_and_gradients(specs[0])])
    for spec, parts in zip(specs, run_ranks(over_slabs, world, specs, torch.float32)[0], strict=True):
        found = torch.cat([part.flatten() for part in parts])
        assert (found - exact)[1:].norm() / exact[1:].norm() <= 1e-5, spec.parallel
        assert found[0] == pytest.approx(exact[0].item(), rel=1e-5)


CROSS = {"decoder_attention": "cross", "decode_share": 0.4}


def rebuild(specs):
    """On every rank: what the model predicts for all masked tokens of its slab, though training would take fewer."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    found = []
    for spec in (over(spec, world) for spec in specs):
        mesh = build_mesh(world, spec.parallel.ulysses) if world > 1 else Mesh(1, 0, 1, None)
        everything = spec.model_copy(update={"model": spec.model.model_copy(update={"decode_share": 1.0})})
        rows = slab_rows(spec.grid[0], mesh.context, mesh.context_rank)
        attend = attends(mesh, spec, share=1.0)
        model = MaskedAutoencoder.from_spec(spec).double()
        with torch.no_grad():
            prediction = model(
                *slab(everything, rows),
                first_row=rows.start,
                attend_encoder=attend.encoder,
                attend_decoder=attend.decoder,
                registers=attend.registers,
                predict=True,
            )
        found.append(prediction)
    return found


def test_all_masked_tokens_are_rebuilt_where_training_takes_a_few():
    modes = [{"context_mode": "ulysses"}, {"context_mode": "hybrid", "ulysses": 2}]
    size = {"width": 24, "depth": 1, "heads": 4, "mlp": 30}
    specs = [
        spec_of(6, {"workers": 4, "context": 4, **mode}, registers=2, encoder=size, decoder=size, **CROSS)
        for mode in modes
    ]
    slabs = [torch.cat(parts, dim=1) for parts in zip(*run_ranks(rebuild, 4, specs), strict=True)]
    for found, right in zip(slabs, rebuild(specs), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-11)


HEADS = 8
MODES = [("gather", 1), ("ring", 1), ("ulysses", 1), ("hybrid", 2), ("hybrid", 4)]


def every_attention(cases):
    """For each (queries, keys, mode, ulysses, dtype): squared error of this rank's output and input gradients against
    the formula over all tokens in fp64; the same of one process in that dtype; and the square of what is right."""
    errors = []
    for queries, keys, mode, ulysses, dtype in cases:
        mesh = build_mesh(len(keys), ulysses)
        generator = torch.Generator().manual_seed(0)
        lengths = (queries, keys, keys, queries)  # of q, k, v and the gradient of the output
        whole = [torch.randn(2, HEADS, sum(of), 8, dtype=torch.float64, generator=generator) for of in lengths]
        own = [slice(sum(of[: mesh.context_rank]), sum(of[: mesh.context_rank + 1])) for of in lengths]
        q, k, v = (t.to(dtype).double().requires_grad_() for t in whole[:3])
        weight = whole[3].to(dtype)
        exact = torch.softmax(q @ k.mT / math.sqrt(8), -1) @ v
        right = [exact, *torch.autograd.grad((exact * weight.double()).sum(), (q, k, v))]
        mine = [t[:, :, of].detach().to(dtype).requires_grad_() for t, of in zip((q, k, v), own, strict=False)]
        out = attend_across(mesh, keys, mode, queries)(*mine)
        found = [out, *torch.autograd.grad((out * weight[:, :, own[3]]).sum(), mine)]
        alone = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        one = torch.nn.functional.scaled_dot_product_attention(*alone)
        plain = [one, *torch.autograd.grad((one * weight).sum(), alone)]
        errors.append(
            [
                [x.square().sum().item() for x in (f.double() - r[:, :, of], (p.double() - r)[:, :, of], r[:, :, of])]
                for f, p, r, of in zip(found, plain, right, (own[3], *own[:3]), strict=True)
            ]
        )
    return errors


@pytest.mark.parametrize("world", [2, 3, 4, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_every_mode_equals_the_formula_at_odd_lengths(world):
    """Outputs and input gradients: fp64 to 1e-10, fp32 to 1e-5, bf16 at most 1.1 times the error of one process."""
    odd, lopsided = [7, 6, 11, 1, 5, 3, 2, 13][:world], [1] * (world - 1) + [17]
    cases = [
        (queries, keys, mode, ulysses, dtype)
        for queries, keys in [(odd, odd), (lopsided, lopsided), (lopsided, odd)]
        for mode, ulysses in MODES
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
        if (mode != "ulysses" or HEADS % world == 0)
        and (mode != "hybrid" or (world % ulysses == 0 and world > ulysses))
    ]
    squares = np.sum(run_ranks(every_attention, world, cases), axis=0)  # [case, tensor, (ours, one process, right)]
    for case, tensors in zip(cases, squares, strict=True):
        for ours, plain, right in np.sqrt(tensors):
            bound = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1.1 * plain / right}[case[4]]
            assert ours / right <= bound, (case, ours / right, plain / right)


def test_slabs_cover_the_rows_evenly():
    for rows in range(1, 30):
        for degree in range(1, rows + 1):
            slabs = [slab_rows(rows, degree, rank) for rank in range(degree)]
            assert [row for slab in slabs for row in slab] == list(range(rows))
            assert max(map(len, slabs)) - min(map(len, slabs)) <= 1
