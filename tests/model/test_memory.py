"""What is kept or computed again changes memory, never a result."""

import pytest
import torch

from sfm.model.mae import MaskedAutoencoder
from tests.distributed import run_ranks
from tests.model.slabs import loss_and_gradients, over_slabs, spec_of
from tests.model.test_mae import make_spec, windows


def with_model(spec, **fields):
    return spec.model_copy(update={"model": spec.model.model_copy(update=fields)})


def gradients(spec):
    model = MaskedAutoencoder.from_spec(spec).double()
    loss = model(*windows(spec, 2))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def bytes_for_backward(spec):
    """Bytes of tensors that autograd keeps from the forward pass, weights left out."""
    model = MaskedAutoencoder.from_spec(spec).double()
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    voxels, visible, masked = windows(spec, 2)
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor is held, so no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(voxels, visible, masked)
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
