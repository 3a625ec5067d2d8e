"""The closed formulas against counts of what torch really computes."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from sfm import plan
from sfm.model.blocks import attend_local
from sfm.model.mae import MaskedAutoencoder
from sfm.model.masking import draw_mask
from sfm.plan import size
from sfm.plan.shares import shares
from sfm.spec import parse_spec

PLAIN = {"positions": "rope", "qk_norm": True}
MODELS = [
    {},
    PLAIN,
    {"checkpoint_activations": True},
    {"checkpoint_activations": True, "keep_attention": True, "registers": 1},
    {"decoder_attention": "cross"},
    {"decoder_attention": "cross", "decode_share": 0.3, "checkpoint_activations": True},
    {"registers": 3},
    {"registers": 2, "decoder_attention": "cross", "decode_share": 0.5},
]


def spec_of(model, shape=(12, 15, 20), batch=1):
    sizes = {
        "encoder": {"width": 36, "depth": 3, "heads": 3, "mlp": 50},
        "decoder": {"width": 24, "depth": 2, "heads": 2, "mlp": 30},
    }
    return parse_spec(
        {
            "surveys": [{"url": "unused"}],
            "window": {"shape": shape},
            "model": {"preset": "tiny", "patch": [4, 3, 5], **sizes, **model},
            "mask": {"ratio": 0.7},
            "batch": {"size": batch},
        }
    )


def attend(q, k, v):
    """Attention in plain products, which the counter sees."""
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def fused(q, k, *_, out_shape=None, **__):  # noqa: ARG001
    """Operations of the CPU's fused kernel, which the counter does not know: two products."""
    return sdpa_flop_count(q, k, k)


def fused_backward(_, q, k, *__, out_shape=None, **___):  # noqa: ARG001
    return 2 * sdpa_flop_count(q, k, k)


KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: fused,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: fused_backward,
}


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize(("batch", "tile"), [(1, None), (2, None), (2, 16)])
def test_operations_of_a_step_equal_what_torch_counts(model, batch, tile, monkeypatch):
    if tile:
        for name in ("mae.HEAD_TILE", "blocks.HIDDEN_TILE"):
            monkeypatch.setattr(f"sfm.model.{name}", tile)
            monkeypatch.setattr(size, name.split(".")[1], tile)
    spec = spec_of(model, batch=batch)
    whole = MaskedAutoencoder.from_spec(spec)
    masks = [draw_mask(spec.grid, spec.mask_ratio, 0, n, None, spec.model.decode_share) for n in range(batch)]
    visible, masked = (torch.stack([torch.from_numpy(m[part]) for m in masks]) for part in (0, 1))
    voxels = torch.randn(batch, *spec.window.shape)
    how = attend_local if spec.model.keep_attention else attend  # what is kept is what the fused kernel gave
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        whole(voxels, visible, masked, attend_encoder=how, attend_decoder=how).backward()
    assert counter.get_total_flops() == batch * plan.flops(spec).hardware


@pytest.mark.parametrize("share", [1.0, 0.5, 0.03])
def test_predicted_tokens_are_those_the_mask_draws(share):
    spec = spec_of({"decoder_attention": "cross", "decode_share": share}, shape=(28, 15, 35))
    _, masked = draw_mask(spec.grid, spec.mask_ratio, 0, 0, None, share)
    assert sum(shares(spec).predicted) == len(masked)


def test_a_cross_decoder_on_a_share_of_queries_saves_what_the_literature_says():
    """At 1,179,648 tokens and ViT-H: more than twice fewer operations at mask 0.75, eight times at 0.9."""

    def per_sample(ratio, **decoder):
        job = {
            "surveys": [{"url": "unused"}],
            "window": {"shape": [1536, 1536, 2048]},
            "model": {"preset": "huge", **decoder},
            "mask": {"ratio": ratio},
            "batch": {"size": 1},
        }
        return plan.flops(parse_spec(job)).model

    cross = {"decoder_attention": "cross", "decode_share": 0.25}
    assert per_sample(0.75) == pytest.approx(112e15, rel=0.01)
    assert per_sample(0.75) / per_sample(0.75, **cross) > 2.3
    assert per_sample(0.9) / per_sample(0.9, **cross) > 8
