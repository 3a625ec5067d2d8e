"""The model against a plain reference that shares no code with it: loops over patches, one head at a time."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sfm import plan
from sfm.model.baseline import neighbour_mean
from sfm.model.mae import MaskedAutoencoder, masked_live
from sfm.model.masking import draw_mask
from sfm.model.patches import gather_patches, scatter_patches
from sfm.plan.shares import visible_per_row
from sfm.spec import PRESETS, SpecError, parse_spec, visible_tokens


def make_spec(window=(8, 12, 8), patch=(4, 3, 2), positions="sincos", normalise=False, ratio=0.6, **model):
    return parse_spec(
        {
            "surveys": [{"url": "unused"}],
            "window": {"shape": list(window)},
            "model": {
                "preset": "tiny",
                "patch": list(patch),
                "encoder": {"width": 40, "depth": 2, "heads": 2, "mlp": 56},
                "decoder": {"width": 28, "depth": 1, "heads": 2, "mlp": 36},
                "positions": positions,
                "normalise_patches": normalise,
                **model,
            },
            "mask": {"ratio": ratio},
        }
    )


def windows(spec, count, dead=True):
    """Random windows with a dead trace and a hole."""
    rng = np.random.default_rng(0)
    voxels = rng.normal(size=(count, *spec.window.shape))
    if dead:
        voxels[:, 1, 2, :] = np.nan
        voxels[:, :3, :2, 4:6] = np.nan
    masks = [draw_mask(spec.grid, spec.mask_ratio, 5, index, None, spec.model.decode_share) for index in range(count)]
    visible, masked = (torch.from_numpy(np.stack(part)) for part in zip(*masks, strict=True))
    return torch.from_numpy(voxels), visible, masked


class Reference:
    """The textbook MAE over one window at a time, written from the paper's equations."""

    def __init__(self, model, spec):
        self.w = dict(model.named_parameters())
        self.spec = spec

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def norm(self, x, name):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / (variance + 1e-5).sqrt() * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def unit(self, x, name):
        return x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt() * self.w[f"{name}.weight"]

    def code(self, place, width):
        if place is None:  # a register
            return torch.zeros(width, dtype=torch.float64)
        out = []
        for coordinate in place:
            angles = [coordinate / 10000 ** (k / (width // 6)) for k in range(width // 6)]
            out += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        return torch.tensor(out + [0.0] * (width - len(out)), dtype=torch.float64)

    def rotate(self, x, place):
        """Turn pairs (c, c + D/2) of one head's vector."""
        if place is None:
            return x
        pairs = len(x) // 2
        angles = [coordinate / 10000 ** (k / (pairs // 3)) for coordinate in place for k in range(pairs // 3)]
        angles = torch.tensor(angles + [0.0] * (pairs - len(angles)), dtype=torch.float64)
        a, b = x[:pairs], x[pairs:]
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()])

    def block(self, x, name, heads, places, memory=None, memory_places=None):
        h = self.norm(x, f"{name}.norm1")
        if memory is None:
            q, k, v = self.linear(h, f"{name}.attention.qkv").chunk(3, dim=-1)
            key_places = places
        else:
            q = self.linear(h, f"{name}.attention.q")
            k, v = self.linear(memory, f"{name}.attention.kv").chunk(2, dim=-1)
            key_places = memory_places
        width = q.shape[-1] // heads
        outputs = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            qh, kh = q[:, part], k[:, part]
            if self.spec.model.qk_norm:
                qh = self.unit(qh, f"{name}.attention.q_norm")
                kh = self.unit(kh, f"{name}.attention.k_norm")
            if self.spec.model.positions == "rope":
                qh = torch.stack([self.rotate(row, place) for row, place in zip(qh, places, strict=True)])
                kh = torch.stack([self.rotate(row, place) for row, place in zip(kh, key_places, strict=True)])
            outputs.append(torch.softmax(qh @ kh.T / math.sqrt(width), dim=-1) @ v[:, part])
        x = x + self.linear(torch.cat(outputs, -1), f"{name}.attention.out")
        h = self.linear(self.norm(x, f"{name}.norm2"), f"{name}.up")
        h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        return x + self.linear(h, f"{name}.down")

    def stack(self, x, name, size, places, memory=None, memory_places=None):
        if self.spec.model.positions == "sincos":
            x = x + torch.stack([self.code(place, size.width) for place in places])
            if memory is not None:
                memory = memory + torch.stack([self.code(place, size.width) for place in memory_places])
        for depth in range(size.depth):
            x = self.block(x, f"{name}.blocks.{depth}", size.heads, places, memory, memory_places)
        return self.norm(x, f"{name}.norm")

    def error(self, window, visible, masked):
        """Sum of squared errors and number of live voxels of the `masked` patches of one window [I, X, T]."""
        (pi, px, pt), (gi, gx, gt) = self.spec.model.patch, self.spec.grid
        places = list(itertools.product(range(gi), range(gx), range(gt)))
        patches = [
            window[i * pi : (i + 1) * pi, x * px : (x + 1) * px, t * pt : (t + 1) * pt].reshape(-1)
            for i, x, t in places
        ]
        shown = [n for n in range(len(places)) if n in set(visible)]
        hidden = [n for n in range(len(places)) if n in set(masked)]
        x = torch.stack([torch.where(patches[n].isnan(), 0.0, patches[n]) for n in shown])
        registers = self.w.get("registers", torch.zeros(0, self.spec.model.encoder_size.width, dtype=torch.float64))
        nowhere = [None] * len(registers)
        seen = [*nowhere, *(places[n] for n in shown)]
        x = self.stack(torch.cat([registers, self.linear(x, "embed")]), "encoder", self.spec.model.encoder_size, seen)
        x = self.linear(x, "bridge")
        size = self.spec.model.decoder_size
        if self.spec.model.decoder_attention == "cross":
            queries = self.w["mask_token"].expand(len(hidden), -1)
            where = [places[n] for n in hidden], x, seen
            x = dict(zip(hidden, self.stack(queries, "decoder", size, *where), strict=True))
        else:
            everything = dict(zip(shown, x[len(registers) :], strict=True)) | dict.fromkeys(
                hidden, self.w["mask_token"]
            )
            x = torch.cat([x[: len(registers)], torch.stack([everything[n] for n in range(len(places))])])
            x = self.stack(x, "decoder", size, [*nowhere, *places])[len(registers) :]
        total, count = torch.zeros((), dtype=torch.float64), 0
        for n in hidden:
            live = ~patches[n].isnan()
            if not live.any():
                continue
            target = patches[n][live]
            if self.spec.model.normalise_patches:
                target = (target - target.mean()) / (target.var(unbiased=False) + 1e-6).sqrt()
            total = total + ((self.linear(x[n], "head")[live] - target) ** 2).sum()
            count += int(live.sum())
        return total, count


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "sincos"},
        {"positions": "sincos", "normalise": True},
        {"positions": "rope"},
        {"positions": "rope", "normalise": True},
        {"positions": "sincos", "qk_norm": True},
        {"positions": "rope", "qk_norm": True},
        {"positions": "sincos", "decoder_attention": "cross", "normalise": True},
        {"positions": "rope", "decoder_attention": "cross", "decode_share": 0.4, "qk_norm": True},
        {"positions": "sincos", "registers": 3},
        {"positions": "rope", "registers": 1},
        {"positions": "sincos", "registers": 2, "decoder_attention": "cross"},
        {"positions": "rope", "registers": 5, "decoder_attention": "cross", "decode_share": 0.4},
    ],
    ids=str,
)
def test_loss_and_every_gradient_equal_the_reference(options):
    spec = make_spec(**options)
    model = MaskedAutoencoder.from_spec(spec).double()
    with torch.no_grad():  # gains and biases that are not one and zero, or a forgotten one would not show
        for p in model.parameters():
            if p.ndim == 1:
                p += 0.1 * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(p.numel()))
    voxels, visible, masked = windows(spec, 2)
    loss = model(voxels, visible, masked)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    reference = Reference(model, spec)
    parts = [reference.error(w, v.tolist(), m.tolist()) for w, v, m in zip(voxels, visible, masked, strict=True)]
    expected = sum(part for part, _ in parts)
    expected.backward()
    assert masked_live(voxels, masked, spec.model.patch).item() == sum(count for _, count in parts)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-9, atol=1e-9, msg=name)


def test_dead_voxels_change_nothing():
    """What stands under a NaN is not seen, and nothing of it is learned."""
    spec = make_spec()
    model = MaskedAutoencoder.from_spec(spec).double()
    voxels, visible, masked = windows(spec, 1, dead=False)
    everywhere = model(voxels, visible, masked)
    holed = voxels.clone()
    tokens = masked[:, :1]
    hole = torch.full((1, 1, math.prod(spec.model.patch)), torch.nan, dtype=torch.float64)
    holed = scatter_patches(hole, tokens, holed, spec.model.patch)
    patch_error = (
        model(voxels, visible, masked, predict=True)[:, 0] - gather_patches(voxels, tokens, spec.model.patch)[:, 0]
    )
    torch.testing.assert_close(model(holed, visible, masked), everywhere - patch_error.square().sum())


@given(
    grid=st.tuples(st.integers(1, 7), st.integers(1, 6), st.integers(1, 6)),
    ratio=st.floats(0.05, 0.95),
    seed=st.integers(0, 2**63 - 1),
    index=st.integers(0, 2**64 - 1),
    degree=st.integers(1, 7),
)
@settings(max_examples=200, deadline=None)
def test_masks_partition_the_tokens_and_slabs_agree(grid, ratio, seed, index, degree):
    visible, masked = draw_mask(grid, ratio, seed, index)
    tokens = math.prod(grid)
    assert sorted([*visible, *masked]) == list(range(tokens))
    assert len(visible) == visible_tokens(tokens, ratio) == sum(visible_per_row(grid, ratio))
    assert max(visible_per_row(grid, ratio)) - min(visible_per_row(grid, ratio)) <= 1
    parts = [
        draw_mask(grid, ratio, seed, index, range(r * grid[0] // degree, (r + 1) * grid[0] // degree))
        for r in range(degree)
        if (r + 1) * grid[0] // degree > r * grid[0] // degree
    ]
    assert np.array_equal(np.concatenate([v for v, _ in parts]), visible)
    assert np.array_equal(np.concatenate([m for _, m in parts]), masked)


@given(
    grid=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(2, 6)),
    ratio=st.floats(0.05, 0.95),
    share=st.floats(0, 1, exclude_min=True),
    index=st.integers(0, 2**64 - 1),
)
@settings(max_examples=100, deadline=None)
def test_a_share_of_the_masked_tokens_is_drawn_row_by_row(grid, ratio, share, index):
    rows, per_row = grid[0], grid[1] * grid[2]
    if not rows <= visible_tokens(math.prod(grid), ratio) <= math.prod(grid) - rows:
        return  # the spec refuses such a mask
    visible, masked = draw_mask(grid, ratio, 7, index)
    same, chosen = draw_mask(grid, ratio, 7, index, None, share)
    assert np.array_equal(same, visible)
    assert set(chosen) <= set(masked)
    counts = np.bincount(chosen // per_row, minlength=rows)
    assert counts.max() - counts.min() <= 1
    assert all(abs(found - share * full) <= 0.5 or found == 1
               for found, full in zip(counts, np.bincount(masked // per_row, minlength=rows), strict=True))  # fmt: skip
    parts = [draw_mask(grid, ratio, 7, index, range(row, row + 1), share)[1] for row in range(rows)]
    assert np.array_equal(np.concatenate(parts), chosen)


def test_predictions_of_a_cross_decoder_do_not_depend_on_each_other():
    spec = make_spec(decoder_attention="cross", positions="rope")
    model = MaskedAutoencoder.from_spec(spec).double()
    voxels, visible, masked = windows(spec, 2)
    everything = model(voxels, visible, masked, predict=True)
    torch.testing.assert_close(model(voxels, visible, masked[:, 3:8], predict=True), everything[:, 3:8])


def test_what_only_a_cross_decoder_can_do_is_refused():
    with pytest.raises(SpecError, match=r"decode_share 0.5 .* decoder_attention self"):
        make_spec(decode_share=0.5)


def test_masks_differ_between_samples_and_seeds():
    masks = {tuple(draw_mask((4, 4, 4), 0.75, seed, index)[0]) for seed in range(10) for index in range(100)}
    assert len(masks) > 990


@given(shape=st.tuples(*[st.integers(1, 4)] * 3), patch=st.tuples(*[st.integers(1, 4)] * 3), first=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_gather_equals_slicing_and_scatter_is_its_inverse(shape, patch, first):
    window = torch.arange(2 * math.prod(shape) * math.prod(patch), dtype=torch.float64)
    window = window.reshape(2, *(s * p for s, p in zip(shape, patch, strict=True)))
    per_row = shape[1] * shape[2]
    tokens = torch.arange(math.prod(shape)).flip(0).expand(2, -1) + first * per_row
    patches = gather_patches(window, tokens, patch, first)
    for position, (i, x, t) in enumerate(reversed(list(itertools.product(*map(range, shape))))):
        expected = window[
            :, i * patch[0] : (i + 1) * patch[0], x * patch[1] : (x + 1) * patch[1], t * patch[2] : (t + 1) * patch[2]
        ]
        assert torch.equal(patches[:, position], expected.flatten(1))
    assert torch.equal(scatter_patches(patches, tokens - first * per_row, torch.zeros_like(window), patch), window)


@pytest.mark.parametrize("part", [slice(None), slice(3, 8), slice(0, 0)], ids=str)
def test_neighbour_mean_equals_a_loop(part):
    grid, volume = (4, 3, 5), 6
    masks = [draw_mask(grid, 0.7, 0, index) for index in range(2)]
    visible, masked = (torch.from_numpy(np.stack(tokens)) for tokens in zip(*masks, strict=True))
    patches = torch.from_numpy(np.random.default_rng(1).normal(size=(*visible.shape, volume)))
    patches[0, 3, 2] = patches[1, :, 4] = torch.nan
    found = neighbour_mean(patches, visible, masked[:, part], grid)  # of any tile of the masked tokens
    assert found.shape == (*masked[:, part].shape, volume)
    for window, row in np.ndindex(*found.shape[:2]):
        shown = {int(n): p for n, p in zip(visible[window], patches[window], strict=True)}
        place = np.unravel_index(int(masked[:, part][window, row]), grid)
        near = [
            shown[n]
            for n, other in enumerate(itertools.product(*map(range, grid)))
            if n in shown and max(abs(a - b) for a, b in zip(place, other, strict=True)) == 1
        ]
        expected = torch.stack(near).nanmean(0).nan_to_num(0.0) if near else torch.zeros(volume, dtype=torch.float64)
        torch.testing.assert_close(found[window, row], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"decoder_attention": "cross"}], ids=str)
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "1.8b"])
def test_presets_have_the_parameters_of_the_formula(preset, options):
    spec = parse_spec({"surveys": [{"url": "unused"}], "model": {"preset": preset, **options}})
    with torch.device("meta"):
        model = MaskedAutoencoder(spec.model, spec.grid)
    assert sum(p.numel() for p in model.parameters()) == plan.parameters(spec)


def test_the_largest_preset_has_1_8_billion_parameters():
    spec = parse_spec({"surveys": [{"url": "unused"}], "model": {"preset": "1.8b"}})
    assert plan.parameters(spec) == pytest.approx(1.87e9, rel=0.01)


def test_same_seed_same_weights():
    spec = make_spec()
    one, two = MaskedAutoencoder.from_spec(spec), MaskedAutoencoder.from_spec(spec)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
