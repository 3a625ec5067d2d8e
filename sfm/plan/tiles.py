"""How much of long sequences is worked on at a time. The plan counts with the same numbers as the model."""

HEAD_TILE = 4096
"""Masked tokens of a micro-batch whose prediction and target are held at a time: with patches of
16 x 16 x 16 each takes 64 MiB in fp32, where those of a window of 1536 x 1536 x 2048 voxels would take 13.5 GiB."""

HIDDEN_TILE = 16_384
"""Tokens of a micro-batch whose hidden layer is held at a time where blocks are computed again: in bf16, 160 MiB for
5,120 channels, where those of a window of 1536 x 1536 x 2048 voxels would take 4.5 GiB in the decoder of every preset
from base on, several times over."""
