"""What an engine holds on each device and sends between them, beside the activations."""

from __future__ import annotations

from typing import NamedTuple

from sfm.plan.size import other_tensors, parameters, stack_tensors
from sfm.spec import JobSpec

PERSISTENT = 100_000
"""DeepSpeed's stage 3 keeps parameter tensors of at most so many numbers gathered (its default)."""


BUCKET = 50_000_000
"""Numbers of weights or gradients that DeepSpeed sends at a time. Its default is ten times as many, which it allocates
whatever the size of the model."""


def bucket(spec: JobSpec) -> int:
    """Numbers that DeepSpeed sends at a time for this model."""
    return min(BUCKET, parameters(spec))


def itemsize(spec: JobSpec) -> int:
    """Bytes of a number in the forward and backward pass."""
    return 2 if spec.precision == "bf16" else 4


def engine_traffic(spec: JobSpec) -> int:
    """Bytes that one rank sends for weights and gradients per optimiser step, counted as direct exchanges.

    With n parameters, s bytes of a number in the pass, W ranks and A micro-batches of a step, W / (W - 1) times it is:

    - ddp: 2 x 4 n, gradients all-reduced once, in fp32;
    - zero1: 2 x 4 n + s n: the same, then updated weights all-gathered;
    - zero2: 2 x 4 n A + s n: as gradients are not kept whole, every micro-batch's are all-reduced (DeepSpeed's buckets
      span several owners, for which it reduces to all);
    - zero3: (2 s b + 4 n) A + s (n - b): tensors that are not small (b numbers in all) are all-gathered forward and
      backward, and gradients reduce-scattered, in every micro-batch; small ones are gathered once;
    - fsdp2: s (2 n' + n - n') A + 4 n: blocks (n' numbers) are all-gathered forward and backward, what is outside
      of them once per micro-batch; gradients reduce-scattered once.

    Padding, norms and counts are left out.
    """
    world, steps, s = spec.parallel.workers, spec.accumulation, itemsize(spec)
    tensors = stack_tensors(spec) + other_tensors(spec)
    n, blocks = sum(tensors), sum(stack_tensors(spec))
    large = sum(size for size in tensors if size > PERSISTENT)
    moved = {
        "ddp": 8 * n,
        "zero1": 8 * n + s * n,
        "zero2": 8 * n * steps + s * n,
        "zero3": (2 * s * large + 4 * n) * steps + s * (n - large),
        "fsdp2": s * (n + blocks) * steps + 4 * n,
    }[spec.parallel.engine]
    return moved * (world - 1) // world


class Upkeep(NamedTuple):
    """Bytes that one device holds at the peak of a step for the model itself."""

    weights: int
    gradients: int
    optimiser: int
    """AdamW's moments, and master weights."""
    exchange: int
    """What is gathered or sent at a time."""


def engine_memory(spec: JobSpec) -> Upkeep:
    """What an engine holds, in terms of n parameters, s bytes of a number in the pass, W ranks, b numbers of a bucket:

    ======= ========== =============== =========== ==============
    engine  weights    gradients       optimiser   exchange, W > 1
    ======= ========== =============== =========== ==============
    ddp     s n        4 n             8 n, bf16   4 n
                                       12 n
    zero1   2 s n      s n + 4 n / W   12 n / W    4 b
    zero2   2 s n      8 n / W         12 n / W    4 b
    zero3   s n / W    8 n / W         12 n / W    6 b
    fsdp2   4 n / W    4 n / W or 4 n  8 n / W     4 n
    ======= ========== =============== =========== ==============

    ZeRO shards optimiser state, then gradients, then weights over all ranks (Rajbhandari et al. 2020). As DeepSpeed does
    it, stages 1 and 2 hold the weights twice, master weights exist in fp32 too, and a rank's gradients meet their fp32
    copy in the step; fsdp2 keeps gradients whole while it accumulates. Where the papers and bytes alive in the tests
    differ, the table follows the bytes.
    """
    n, workers, s, b = parameters(spec), spec.parallel.workers, itemsize(spec), bucket(spec)
    several = workers > 1
    whole_gradients = 4 * n if spec.accumulation > 1 else 4 * n // workers
    return {
        "ddp": Upkeep(s * n, 4 * n, (8 if s == 4 else 12) * n, 4 * n * several),
        "zero1": Upkeep(2 * s * n, s * n + 4 * n // workers, 12 * n // workers, 4 * b * several),
        "zero2": Upkeep(2 * s * n, 8 * n // workers, 12 * n // workers, 4 * b * several),
        "zero3": Upkeep(s * n // workers, 8 * n // workers, 12 * n // workers, 6 * b if several else 4 * b),
        "fsdp2": Upkeep(4 * n // workers, whole_gradients, 8 * n // workers, 4 * n * several),
    }[spec.parallel.engine]
