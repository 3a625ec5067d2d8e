"""What is kept or computed again changes memory, never a result."""

import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sfm.model import blocks
from sfm.model.mae import MaskedAutoencoder, masked_live
from sfm.model.patches import gather_patches
from sfm.spec import Parallel
from tests.distributed import run_ranks
from tests.live import LiveBytes
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


def peak_of_step(spec, batch):
    """Most bytes live in a forward and backward pass beside weights and batch."""
    model = MaskedAutoencoder.from_spec(spec).double()
    with LiveBytes() as counter:
        model(*batch).backward()
    return counter.peak


@pytest.mark.parametrize("positions", ["sincos", "rope"])
def test_blocks_computed_again_have_the_same_gradients(positions):
    spec = make_spec(positions=positions)
    again = with_model(spec, checkpoint_activations=True)
    for found, expected in zip(gradients(again), gradients(spec), strict=True):
        assert torch.equal(found, expected)
    assert bytes_for_backward(again) < bytes_for_backward(spec) / 2


class Calls(TorchDispatchMode):
    """Counts how often an operation is really carried out."""

    def __init__(self, name):
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func).endswith(self.name)
        return func(*args, **(kwargs or {}))


def test_kept_attention_is_not_computed_again():
    spec = make_spec(positions="rope")
    kept = with_model(spec, checkpoint_activations=True, keep_attention=True)
    for found, expected in zip(gradients(kept), gradients(spec), strict=True):
        assert torch.equal(found, expected)
    calls = {}
    for name, of in (("once", spec), ("kept", kept), ("again", with_model(spec, checkpoint_activations=True))):
        with Calls("_scaled_dot_product_flash_attention_for_cpu.default") as counter:
            gradients(of)
        calls[name] = counter.count
    assert calls["kept"] == calls["once"] == calls["again"] / 2 > 0


def test_blocks_computed_again_exchange_keys_and_values_again():
    recompute = {"positions": "rope", "checkpoint_activations": True}
    specs = [spec_of(5, positions="rope"), spec_of(5, **recompute), spec_of(5, **recompute, keep_attention=True)]
    for kept, again, partly in run_ranks(over_slabs, 2, specs):
        assert all(torch.equal(a, b) for a, b in zip(again, kept, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(partly, kept, strict=True))
        for part, right in zip(again, loss_and_gradients(specs[0]), strict=True):
            torch.testing.assert_close(part, right, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("normalise", [False, True])
def test_head_and_loss_in_tiles_have_the_same_gradients(normalise, monkeypatch):
    spec = make_spec((16, 24, 16), (8, 6, 4), normalise=normalise)
    expected, kept = gradients(spec), bytes_for_backward(spec)
    monkeypatch.setattr("sfm.model.mae.HEAD_TILE", 7)  # three tokens of each of two windows
    for found, right in zip(gradients(spec), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)
    _, _, masked = windows(spec, 2)
    assert bytes_for_backward(spec) < kept - masked.numel() * math.prod(spec.model.patch) * 8


def test_training_never_predicts_more_than_a_tile_at_once_and_predict_all(monkeypatch):
    monkeypatch.setattr("sfm.model.mae.HEAD_TILE", 7)
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


@pytest.mark.parametrize("options", [{}, {"decoder_attention": "cross"}], ids=str)
def test_feed_forward_in_tiles_has_the_same_gradients(options, monkeypatch):
    spec = make_spec(positions="rope", **options)
    again = with_model(spec, checkpoint_activations=True)
    monkeypatch.setattr(blocks, "HIDDEN_TILE", 7)  # three tokens of each of two windows, the last tile shorter
    for found, right in zip(gradients(again), gradients(spec), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


def test_feed_forward_in_tiles_holds_no_long_hidden_layer(monkeypatch):
    wide = {"width": 16, "depth": 2, "heads": 2, "mlp": 512}
    spec = make_spec((16, 48, 32), (4, 3, 2), encoder=wide, decoder=wide, checkpoint_activations=True)
    batch = windows(spec, 1)
    hidden = spec.tokens * 512 * 8
    whole = peak_of_step(spec, batch)
    assert whole > 2 * hidden  # the layer before and after its non-linearity
    monkeypatch.setattr(blocks, "HIDDEN_TILE", 16)
    assert peak_of_step(spec, batch) < hidden


def test_weights_used_in_many_tiles_have_gradients_as_exact_as_used_once(monkeypatch):
    """In bf16: sums over tiles are kept in fp32 and rounded once."""
    spec = make_spec((16, 24, 16), (4, 6, 4), checkpoint_activations=True)
    batch = windows(spec, 1)
    exact, names = gradients_of(spec, torch.float64, batch), ("head.weight", "decoder.blocks.0.down.weight")
    once = gradients_of(spec, torch.bfloat16, batch)
    monkeypatch.setattr(blocks, "HIDDEN_TILE", 1)
    monkeypatch.setattr("sfm.model.mae.HEAD_TILE", 1)
    tiled = gradients_of(spec, torch.bfloat16, batch)
    for name in names:
        error, alone = ((found[name].double() - exact[name]).norm() for found in (tiled, once))
        assert error < 1.1 * alone


def gradients_of(spec, dtype, batch):
    model = MaskedAutoencoder.from_spec(spec).bfloat16().to(dtype)  # the same weights in either
    model(*batch).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_inputs_of_blocks_wait_in_the_host_s_memory(monkeypatch):
    """On CPUs nothing is moved; here a copy stands for the host's, and what was copied must be gone."""
    spec = with_model(make_spec(positions="rope"), checkpoint_activations=True)
    expected = gradients(spec)
    sent = []

    def to_host(x):
        sent.append((x.shape, weakref.ref(x.untyped_storage())))
        return blocks.OnHost(x.clone(), x.device)

    monkeypatch.setattr(blocks, "to_host", to_host)
    monkeypatch.setattr(blocks.OnHost, "fetch", lambda held: held.copy)
    away = with_model(spec, offload_activations=True)
    model, batch = MaskedAutoencoder.from_spec(away).double(), windows(away, 2)
    loss = model(*batch)
    _, visible, _ = batch
    encoder, decoder = away.model.encoder_size, away.model.decoder_size
    assert [shape for shape, _ in sent] == [
        *[(2, visible.shape[1], encoder.width)] * encoder.depth,
        *[(2, away.tokens, decoder.width)] * decoder.depth,
    ]
    assert not any(storage() for _, storage in sent)
    loss.backward()
    for found, right in zip([loss.detach(), *(p.grad for p in model.parameters())], expected, strict=True):
        assert torch.equal(found, right)


def test_what_is_in_the_host_s_memory_already_stays():
    x = torch.randn(3)
    assert blocks.to_host(x) is x


@pytest.mark.gpu
def test_inputs_of_blocks_go_to_the_host_and_come_back():
    spec = make_spec((32, 48, 32), checkpoint_activations=True, positions="rope")
    batch = [t.cuda() for t in windows(spec, 2)]
    found = []
    for flag in (False, True):
        model = MaskedAutoencoder.from_spec(with_model(spec, offload_activations=flag)).double().cuda()
        model(*batch).backward()
        found.append([p.grad for p in model.parameters()])
    for kept, away in zip(*found, strict=True):
        torch.testing.assert_close(away, kept, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_different_numbers_of_tiles_do_not_wait_for_each_other(world):
    """Engines that shard weights gather them when a module is called: all ranks must call it equally often."""
    spec = spec_of(5, positions="rope", checkpoint_activations=True)  # slabs of one to three patch rows
    batch = spec.batch.model_copy(update={"size": 2})
    plain, *sharded = (
        spec.model_copy(update={"batch": batch, "parallel": Parallel(workers=n, context=n, engine=engine)})
        for n, engine in ((1, "ddp"), (world, "zero3"), (world, "fsdp2"))
    )
    expected = run_ranks(take_steps, 1, [plain], 10**6)[0][0]
    for by_engine in run_ranks(take_steps, world, sharded, 8):
        for losses in by_engine:
            assert losses == pytest.approx(expected, rel=1e-5)
