"""Which way attention crosses devices, and what that sends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sfm.plan.engines import itemsize
from sfm.plan.shares import shares
from sfm.plan.traffic import ExactMode, attention_traffic
from sfm.spec import JobSpec


def context_traffic(spec: JobSpec) -> list[int]:
    """Bytes that attention makes each context rank send per optimiser step.

    Every block of both stacks, forward and backward, and forward once more where blocks are computed again.
    """
    spec = settle(spec)
    part, s, model = shares(spec), itemsize(spec), spec.model
    degree, mode = spec.parallel.context, spec.parallel.context_mode
    assert mode != "auto"
    exact: ExactMode = "gather" if mode == "torch" else mode  # its default rotation gathers keys and values
    stacks: list[tuple[int, int, Sequence[int], Sequence[int]]] = [
        (model.encoder_size.depth, model.encoder_size.width, part.encoder, part.encoder),
        (model.decoder_size.depth, model.decoder_size.width, part.keys, part.queries),
    ]
    sent = []
    for rank in range(degree):
        total = 0
        for depth, width, keys, queries in stacks:
            one = attention_traffic(exact, keys, rank, width * spec.micro_batch, s, spec.parallel.ulysses, queries)
            total += depth * (one.forward * (2 if model.checkpoint_activations else 1) + one.backward)
        sent.append(total * spec.accumulation)
    return sent


def settle(spec: JobSpec) -> JobSpec:
    """`spec` with context_mode `auto` replaced by the mode in which the busiest rank sends fewest bytes.

    Candidates are gather, ring, and where degrees divide the heads of both stacks ulysses and every hybrid; where the
    spec says what devices it runs on and one of these fits them, only those that do. Among equals the one that takes
    least memory is taken. The bytes are those of :func:`sfm.plan.traffic.attention_traffic`.
    """
    if spec.parallel.context_mode != "auto":
        return spec
    from sfm.plan.fit import capacity  # these two settle jobs themselves
    from sfm.plan.footprint import memory

    room = capacity(spec) or math.inf

    def cost(candidate: JobSpec) -> tuple[bool, int, int]:
        total = memory(candidate).total
        return total > room, max(context_traffic(candidate)), total

    return min(_candidates(spec), key=cost)


def _candidates(spec: JobSpec) -> Iterator[JobSpec]:
    degree = spec.parallel.context
    heads = math.gcd(spec.model.encoder_size.heads, spec.model.decoder_size.heads)
    whole = spec.model.keep_attention  # then attention must come in one piece
    modes: list[tuple[str, int]] = [("gather", 1)] if whole else [("gather", 1), ("ring", 1)]
    for group in range(2, degree + 1):
        if degree % group == 0 and heads % group == 0 and (group == degree or not whole):
            modes.append(("ulysses", 1) if group == degree else ("hybrid", group))
    for mode, group in modes:
        parallel = spec.parallel.model_copy(update={"context_mode": mode, "ulysses": group})
        yield spec.model_copy(update={"parallel": parallel})
