"""What an engine holds on each device and sends between them, beside the activations."""

from __future__ import annotations

from sfm.plan.size import other_tensors, parameters, stack_tensors
from sfm.spec import JobSpec

PERSISTENT = 100_000
"""DeepSpeed's stage 3 keeps parameter tensors of at most so many numbers gathered (its default)."""


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


def engine_memory(spec: JobSpec) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimiser state that one device holds at the peak of a step.

    Weights are held in the precision of the pass, master weights (bf16 only) and AdamW's two moments in fp32.
    ZeRO stage 1 shards the optimiser state over all workers, stage 2 the gradients too, stage 3 the weights too
    (Rajbhandari et al. 2020), and so does fsdp2, which keeps its weights in fp32 and gradients whole while it
    accumulates. Engines ddp and fsdp2 sum gradients in fp32.
    """
    n, workers, s = parameters(spec), spec.parallel.workers, itemsize(spec)
    engine = spec.parallel.engine
    stage = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}[engine]
    master = 0 if s == 4 or engine == "fsdp2" else 4  # fsdp2 has no second copy: its weights are fp32
    weights = n * (4 if engine == "fsdp2" else s) // (workers if stage >= 3 else 1)
    whole_gradients = stage < 2 or (engine == "fsdp2" and spec.accumulation > 1)
    gradients = n * (4 if engine in ("ddp", "fsdp2") else s) // (1 if whole_gradients else workers)
    optimiser = n * (8 + master) // (workers if stage >= 1 else 1)
    return weights, gradients, optimiser
