"""What is kept or computed again changes memory, never a result."""

import math

import pytest
import torch

from sfm.model.mae import MaskedAutoencoder, masked_live
from sfm.model.patches import gather_patches
from sfm.spec import Parallel
from tests.distributed import run_ranks
from tests.model.slabs import loss_and_gradients, over_slabs, spec_of, take_steps
from tests.model.test_mae import make_spec, windows


def with_model(spec, **fields):
    return spec.model_copy(update={"model": spec.model.model_copy(update=fields)})


def gradients(spec):
    model = MaskedAutoencoder.from_spec(spec).double()
    loss = model(*windows(spec, 2))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def bytes_for_backward(spec):
    """Bytes of tensors that autograd keeps from the forward pass, weights and batch left out."""
    model = MaskedAutoencoder.from_spec(spec).double()
    batch = windows(spec, 2)
    held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *batch)}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor is held, so no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(*batch)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("positions", ["sincos", "rope"])
def test_blocks_computed_again_have_the_same_gradients(positions):
    spec = make_spec(positions=positions)
    again = with_model(spec, checkpoint_activations=True)
    for found, expected in zip(gradients(again), gradients(spec), strict=True):
        assert torch.equal(found, expected)
    assert bytes_for_backward(again) < bytes_for_backward(spec) / 2


def test_blocks_computed_again_exchange_keys_and_values_again():
    specs = [spec_of(5, positions="rope", checkpoint_activations=flag) for flag in (False, True)]
    for kept, again in run_ranks(over_slabs, 2, specs):
        assert all(torch.equal(a, b) for a, b in zip(again, kept, strict=True))
        for part, right in zip(again, loss_and_gradients(specs[0]), strict=True):
            torch.testing.assert_close(part, right, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("normalise", [False, True])
def test_head_and_loss_in_tiles_have_the_same_gradients(normalise, monkeypatch):
    spec = make_spec((16, 24, 16), (8, 6, 4), normalise=normalise)
    expected, kept = gradients(spec), bytes_for_backward(spec)
    monkeypatch.setattr("sfm.model.mae.TILE", 7)  # three tokens of each of two windows
    for found, right in zip(gradients(spec), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)
    _, _, masked = windows(spec, 2)
    assert bytes_for_backward(spec) < kept - masked.numel() * math.prod(spec.model.patch) * 8


def test_training_never_predicts_more_than_a_tile_at_once_and_evaluation_all(monkeypatch):
    monkeypatch.setattr("sfm.model.mae.TILE", 7)
    spec = make_spec()
    model, batch, seen = MaskedAutoencoder.from_spec(spec).double(), windows(spec, 2), []
    linear = torch.nn.functional.linear

    def spy(x, weight, bias):
        if weight is model.head.weight:
            seen.append(x.shape[:2].numel())
        return linear(x, weight, bias)

    monkeypatch.setattr("torch.nn.functional.linear", spy)
    model(*batch).backward()
    assert max(seen) <= 7
    assert sum(seen) == 2 * batch[2].numel()  # forward, and again in the backward pass
    assert model(*batch, predict=True).shape[:2] == batch[2].shape


@pytest.mark.parametrize("first_row", [0, 3])
def test_live_voxels_are_counted_as_in_a_loop(first_row):
    spec = make_spec()
    voxels, _, masked = windows(spec, 3)
    patches = gather_patches(voxels, masked, spec.model.patch)
    expected = sum(int((~patch.isnan()).sum()) for window in patches for patch in window)
    per_row = spec.grid[1] * spec.grid[2]
    assert masked_live(voxels, masked + first_row * per_row, spec.model.patch, first_row).item() == expected


def test_ranks_with_different_numbers_of_tiles_do_not_wait_for_each_other():
    """Engines that shard weights gather them when a module is called: all ranks must call it equally often."""
    spec = spec_of(5, positions="rope", checkpoint_activations=True)  # slabs of two and three patch rows
    batch = spec.batch.model_copy(update={"size": 2})
    sharded, plain = (
        spec.model_copy(update={"batch": batch, "parallel": Parallel(workers=n, context=n, engine=engine)})
        for n, engine in ((2, "zero3"), (1, "ddp"))
    )
    expected = run_ranks(take_steps, 1, plain, 10**6)[0]
    for losses in run_ranks(take_steps, 2, sharded, 8):
        assert losses == pytest.approx(expected, rel=1e-5)
