"""Does a job fit a device, and if not, what is the nearest job that does."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from sfm.plan.footprint import memory
from sfm.plan.machines import GPUS
from sfm.spec import JobSpec, SfmError, SpecError, parse_spec

USABLE = 0.92
"""Share of a GPU's memory that a job may plan with; the rest goes to the CUDA context, communication buffers and
fragmentation."""

Change = tuple[str, object]
"""A field of a job spec, as `batch.micro`, and its new value."""


class FitError(SfmError):
    """The job does not fit the memory of its devices."""


def capacity(spec: JobSpec) -> float | None:
    """Bytes of one device that `spec` may plan with; None where it does not say what devices it runs on."""
    if spec.resources.memory_gib is not None:
        return spec.resources.memory_gib * 2**30
    if spec.resources.gpu is not None:
        return GPUS[spec.resources.gpu].memory * USABLE
    return None


def check(spec: JobSpec, found: float | None = None) -> None:
    """Refuse a job that does not fit its devices.

    Args:
        found: bytes that a device was found to have; default: what the spec says of them, if anything.

    Raises:
        FitError: how much is missing, of what, and the nearest setting that fits.
    """
    room = capacity(spec) if found is None else found * USABLE
    need = memory(spec)
    if room is None or need.total <= room:
        return
    parts = ", ".join(f"{name} {_size(value)}" for name, value in vars(need).items())
    where = "this device"
    if found is None:
        where = f"a {spec.resources.gpu}" if spec.resources.memory_gib is None else "resources.memory_gib"
    raise FitError(
        f"window.shape {list(spec.window.shape)} needs {_size(need.total)} on each device ({parts}) and "
        f"{where} leaves {_size(room)}; {_advice(spec, room)}"
    )


def _advice(spec: JobSpec, room: float) -> str:
    changes, best = nearest(spec, room)
    least = memory(best)
    if least.total <= room:
        return f"what fits: {in_words(changes)}"
    kept = least.total - least.activations
    return (
        f"no setting that was tried fits: the smallest still takes {_size(least.total)}, {_size(kept)} of it for weights, "
        f"gradients and optimiser; take a smaller model.preset, or parallel.engine zero3 over more workers, for which "
        f"batch.size must grow"
    )


def _size(value: float) -> str:
    unit, name = next((one for one in ((2**30, "GiB"), (2**20, "MiB")) if value >= one[0]), (2**10, "KiB"))
    return f"{value / unit:.1f} {name}"


def in_words(changes: Sequence[Change]) -> str:
    """Changes as a user writes them: `batch.micro 1, model.checkpoint_activations true`."""
    return ", ".join(f"{field} {value if isinstance(value, str) else json.dumps(value)}" for field, value in changes)


def changed(spec: JobSpec, changes: Sequence[Change]) -> JobSpec:
    """`spec` with these changes.

    Raises:
        SpecError: the changed spec is not valid.
    """
    data = spec.model_dump(mode="json")
    for field, value in changes:
        part, name = field.split(".")
        data[part][name] = value
    return parse_spec(data)


def nearest(spec: JobSpec, room: float) -> tuple[list[Change], JobSpec]:
    """The nearest changes by which `spec` fits into `room` bytes a device, and the job they make.

    Kinds of change are taken in the order of what they cost (see `_kinds`), each as far as it goes and on top of those
    before it, until the job fits. Then each, the dearest first, is taken back as far as the job still fits; without any
    one of those that are left it does not. Where nothing fits, the smallest job found is returned.
    """

    def fits(job: JobSpec) -> bool:
        return memory(job).total <= room

    picked: _Picked = {}
    job, kinds = spec, list[list[Change]]()
    for options in _kinds(spec, picked):
        if fits(job):
            break
        kinds.append(options)
        furthest = islice(_valid(spec, ({**picked, field: value} for field, value in reversed(options))), 2)
        # The last is not always the smallest; among equals it is taken, as it may matter with what comes after.
        further, job = min([*furthest, (picked, job)], key=lambda option: memory(option[1]).total)
        picked.update(further)
    if not fits(job):
        return _spelt(spec, picked), job

    for options in 2 * kinds[::-1]:  # again, as what was taken back last may let the first go further back
        without = {field: value for field, value in picked.items() if field != options[0][0]}
        milder = _valid(spec, (without, *({**without, field: value} for field, value in options)))
        picked, job = next((option for option in milder if fits(option[1])), (picked, job))
    return _needed(spec, _spelt(spec, picked), fits)


def _needed(spec: JobSpec, changes: list[Change], fits: Callable[[JobSpec], bool]) -> tuple[list[Change], JobSpec]:
    """`changes` without any that can be left out, and the job they make."""
    for change in reversed(changes):
        rest = [other for other in changes if other != change]
        with contextlib.suppress(SpecError):
            if fits(changed(spec, rest)):
                return _needed(spec, rest, fits)
    return changes, changed(spec, changes)


_Picked = dict[str, object]
"""Fields of a spec, or `_DATA`, and their new values."""


def _valid(spec: JobSpec, options: Iterable[_Picked]) -> Iterator[tuple[_Picked, JobSpec]]:
    """Those of `options` that make a job, and that job."""
    for option in options:
        with contextlib.suppress(SpecError):
            yield option, changed(spec, _spelt(spec, option))


_DATA = "parallel.data"  # no field of a spec: parallel.workers follows from it and the context degree


def _spelt(spec: JobSpec, picked: _Picked) -> list[Change]:
    """`picked` in fields of a spec, with what follows from it and without what `spec` has already."""
    now, fields = spec.parallel, {field: value for field, value in picked.items() if field != _DATA}
    context, data = (int(str(picked.get(f"parallel.{name}", getattr(now, name)))) for name in ("context", "data"))
    heads = math.gcd(spec.model.encoder_size.heads, spec.model.decoder_size.heads)
    if (now.context_mode == "ulysses" and heads % context) or (now.context_mode == "hybrid" and context % now.ulysses):
        fields.setdefault("parallel.context_mode", "auto")
    if "parallel.context_mode" in fields:
        fields["parallel.ulysses"] = 1
    fields["parallel.workers"] = context * data
    given = spec.model_dump(mode="json")
    return [(field, fields[field]) for field in sorted(fields) if fields[field] != _value(given, field)]


def _value(given: Mapping[str, Any], field: str) -> object:
    part, name = field.split(".")
    return given[part][name]


_ENGINES = ("ddp", "zero1", "zero2", "fsdp2", "zero3")


def _kinds(spec: JobSpec, picked: _Picked) -> Iterator[list[Change]]:
    """Kinds of change, cheapest first: options for one field that take less and less memory.

    A smaller micro-batch, and what is computed again or off-loaded; another way of attention and more sharding, which
    cost communication; more devices; a smaller window, which costs context. `picked` is what has been taken so far.
    """

    def now() -> JobSpec:
        return changed(spec, _spelt(spec, picked))

    def attention() -> list[Change]:
        modes = ("auto", "ring") if now().parallel.context > 1 else ("auto",)
        return [("parallel.context_mode", mode) for mode in modes]

    def engine() -> list[Change]:
        more = _ENGINES[_ENGINES.index(spec.parallel.engine) + 1 :] or ("fsdp2", "zero3")
        return [("parallel.engine", name) for name in more]

    share = spec.batch.size // spec.parallel.data
    if micros := [n for n in range(spec.micro_batch - 1, 0, -1) if share % n == 0]:
        yield [("batch.micro", n) for n in micros]
    yield [("model.keep_attention", False)]
    yield [("model.checkpoint_activations", True)]
    if spec.resources.device == "gpu":
        yield [("model.offload_activations", True)]
    yield attention()
    yield engine()
    rows = spec.grid[0]
    few_or_even = [n for n in range(spec.parallel.context + 1, rows + 1) if n <= 16 or n % 8 == 0 or rows % n == 0]
    ranks: list[list[Change]] = [
        [("parallel.context", n) for n in few_or_even],
        [(_DATA, n) for n in range(spec.parallel.data + 1, spec.batch.size + 1) if spec.batch.size % n == 0],
    ]
    held = memory(now())
    weights_dominate = held.activations < held.total / 2
    yield from (options for options in (ranks[::-1] if weights_dominate else ranks) if options)
    yield attention()
    yield engine()
    if shapes := list(_smaller(spec)):
        yield [("window.shape", shape) for shape in shapes]


def _smaller(spec: JobSpec) -> Iterator[list[int]]:
    """Smaller and smaller windows: the longer of crossline and sample becomes 2^n or 3 x 2^n patches.

    Along inline a window must keep a patch row for each context rank.
    """
    grid = list(spec.grid)
    while max(grid[1:]) > 1:
        axis = max((1, 2), key=lambda a: (grid[a] > 1, grid[a] * spec.model.patch[a]))
        power = 1 << (grid[axis] - 1).bit_length() - 1  # the largest power of two below
        grid[axis] = power * 3 // 2 if 1 < power * 3 // 2 < grid[axis] else power
        yield [n * patch for n, patch in zip(grid, spec.model.patch, strict=True)]
