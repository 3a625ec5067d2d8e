"""A decoder that only asks the encoder's output gives the same over slabs as over the whole window."""

import pytest
import torch

from tests.distributed import run_ranks
from tests.model.slabs import loss_and_gradients, over_slabs, spec_of


@pytest.mark.parametrize("degree", [2, 3])
def test_loss_and_every_gradient_equal_one_process(degree):
    specs = [
        spec_of(5, decoder_attention="cross"),
        spec_of(5, decoder_attention="cross", positions="rope", decode_share=0.3, qk_norm=True),
        spec_of(5, decoder_attention="cross", positions="rope", decode_share=0.3, checkpoint_activations=True),
    ]
    expected = [loss_and_gradients(spec) for spec in specs]
    for rank in run_ranks(over_slabs, degree, specs):
        for found, right in zip(rank, expected, strict=True):
            for part, whole in zip(found, right, strict=True):
                torch.testing.assert_close(part, whole, rtol=1e-10, atol=1e-11)
