"""What attention over several devices sends, in closed form. Pure Python; the tests count it on real processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

ExactMode = Literal["gather", "ring", "ulysses", "hybrid"]


class Traffic(NamedTuple):
    """What one rank does in the forward and backward pass of one attention.

    Bytes are those that leave the rank. A collective is counted as a direct exchange: what is for another rank is sent
    to it once. The ring algorithms of NCCL send as much.
    """

    operations: int
    """Collectives it takes part in, and blocks it hands to a neighbour (what it receives is another's to count)."""
    forward: int
    """Bytes sent in the forward pass."""
    backward: int
    """Bytes sent in the backward pass."""


def attention_traffic(
    mode: ExactMode,
    lengths: Sequence[int],
    rank: int,
    width: int,
    itemsize: int,
    ulysses: int = 1,
    queries: Sequence[int] | None = None,
) -> Traffic:
    r"""Traffic of context rank `rank` in one attention, forward and backward.

    With P ranks, n_r tokens on rank r, N of all, n on this rank, w = `width`, s = `itemsize`, and g = max(s, 4),
    the bytes of a number in a gradient that ranks sum, which is done in at least fp32:

    ======== ==================================== ============================================ ==================
    mode     forward, bytes                       backward, bytes                              operations
    ======== ==================================== ============================================ ==================
    gather   2 w s (P - 1) max(n_r)               2 w g (P - 1) max(n_r)                       1 + 1
    ring     2 w s (N - n_next)                   2 w s (N - n_next) + 2 w g N                 (P - 1) + (2 P - 1)
    ulysses  4 w s n (P - 1) / P, if tokens are   as forward: what is moved is not summed,     2 + 2
             even; else w s (3 n (P - 1) + N - n) and travels as it is:
             / P                                  w s (n (P - 1) + 3 (N - n)) / P
    hybrid   ulysses among the U neighbours, and a ring over the P / U groups with w / U and the groups' tokens
    ======== ==================================== ============================================ ==================

    gather: keys and values of every rank, padded to the longest; then their gradients, summed for their owner.
    ring: every block of keys and values but the next rank's own passes through this rank's hands; in the backward
    pass again, and every block's gradient, on its way back to its owner.
    ulysses: queries, keys and values for heads; then the output for tokens, n (P - 1) being replaced by N - n.

    Where queries are other tokens than keys, one of the three, and the output, count the queries in place of n and N;
    gather and ring leave queries where they are.

    Args:
        lengths: tokens (keys) on each rank of the context group.
        width: numbers of a token in each of queries, keys, values and output: channels x samples of a micro-batch.
        itemsize: bytes of a number in the forward pass.
        ulysses: neighbours that trade heads, in mode hybrid.
        queries: queries on each rank, where they are other tokens than the keys.
    """
    size = len(lengths)
    queries = lengths if queries is None else queries
    exact = max(itemsize, 4)
    if size == 1:
        return Traffic(0, 0, 0)
    if mode == "gather":
        blocks = 2 * width * (size - 1) * max(lengths)
        return Traffic(2, itemsize * blocks, exact * blocks)
    if mode == "ring":
        passed_on = 2 * width * itemsize * (sum(lengths) - lengths[(rank + 1) % size])
        return Traffic(3 * size - 2, passed_on, passed_on + 2 * width * exact * sum(lengths))
    if mode == "ulysses":
        to_heads = (size - 1) * (queries[rank] + 2 * lengths[rank])  # queries, keys, values
        to_tokens = sum(queries) - queries[rank]  # output
        gradients = (size - 1) * queries[rank] + sum(queries) - queries[rank] + 2 * (sum(lengths) - lengths[rank])
        number = width // size * itemsize
        return Traffic(4, number * (to_heads + to_tokens), number * gradients)
    firsts = range(0, size, ulysses)
    group = slice(rank // ulysses * ulysses, (rank // ulysses + 1) * ulysses)
    heads = attention_traffic("ulysses", lengths[group], rank % ulysses, width, itemsize, queries=queries[group])
    groups = [sum(lengths[first : first + ulysses]) for first in firsts]
    ring = attention_traffic("ring", groups, rank // ulysses, width // ulysses, itemsize)
    return Traffic(*(one + other for one, other in zip(heads, ring, strict=True)))
