"""Does a job fit a device, and if not, what is the nearest job that does."""

from __future__ import annotations

from collections.abc import Iterator

from sfm.plan.footprint import memory
from sfm.plan.machines import GPUS
from sfm.spec import JobSpec, SfmError, SpecError, parse_spec

USABLE = 0.92
"""Share of a GPU's memory that a job may plan with; the rest goes to the CUDA context, communication buffers and
fragmentation."""


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
    parts = ", ".join(f"{name} {value / 2**30:.1f}" for name, value in vars(need).items())
    known = (
        {} if found is not None else {"resources.memory_gib": spec.resources.memory_gib, f"a {spec.resources.gpu}": 1}
    )
    where = next((name for name, value in known.items() if value is not None), "this device")
    fitting = nearest(spec, room)
    advice = (
        f"what fits: {fitting[0]}" if fitting else "no setting of this model and window fits; take a smaller window"
    )
    raise FitError(
        f"window.shape {list(spec.window.shape)} needs {need.total / 2**30:.1f} GiB on each device ({parts} GiB) and "
        f"{where} leaves {room / 2**30:.1f}; {advice}"
    )


def nearest(spec: JobSpec, room: float) -> tuple[str, JobSpec] | None:
    """The cheapest change by which `spec` fits into `room` bytes a device, in words and done; None if there is none.

    Changes are tried in the order of what they cost: a smaller micro-batch (nothing), recomputed blocks (a third more
    compute), off-loading, more sharding (communication), more context ranks (devices), a smaller window (context).
    Each is tried on top of those before it.
    """
    for words, candidate in _changes(spec):
        if memory(candidate).total <= room:
            return words, candidate
    return None


def _changes(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    words: list[str] = []

    def tried(change: str, **fields: dict[str, object]) -> JobSpec | None:
        data = spec.model_dump(mode="json")
        for part, values in fields.items():
            data[part].update(values)
        try:
            changed = parse_spec(data)
        except SpecError:
            return None
        words[:] = [w for w in words if w.split()[0] != change.split()[0]] + [change]
        return changed

    share = spec.batch.size // spec.parallel.data
    for micro in sorted((n for n in range(1, spec.micro_batch) if share % n == 0), reverse=True):
        if (changed := tried(f"batch.micro {micro}", batch={"micro": micro})) is not None:
            spec = changed
            yield ", ".join(words), spec
    for field in ("checkpoint_activations", "offload_activations"):
        if (changed := tried(f"model.{field} true", model={field: True})) is not None and changed != spec:
            spec = changed
            yield ", ".join(words), spec
    for engine in {"ddp": ("zero1", "zero2", "zero3"), "zero1": ("zero2", "zero3"), "zero2": ("zero3",)}.get(
        spec.parallel.engine, ()
    ):
        if (changed := tried(f"parallel.engine {engine}", parallel={"engine": engine})) is not None:
            spec = changed
            yield ", ".join(words), spec
    data_degree, mode = spec.parallel.data, {"context_mode": "auto", "ulysses": 1}
    for context in range(spec.parallel.context + 1, spec.grid[0] + 1):
        workers = {"workers": context * data_degree, "context": context, **mode}
        change = f"parallel.context {context} on {context * data_degree} workers"
        if (changed := tried(change, parallel=workers)) is not None:
            spec = changed
            yield ", ".join(words), spec
    while max(spec.grid[1:]) > 1:  # along inline a window must keep a patch row for each context rank
        axis = max((1, 2), key=lambda a: spec.window.shape[a])
        shape = list(spec.window.shape)
        shape[axis] = max(1, spec.grid[axis] // 2) * spec.model.patch[axis]
        changed = tried(f"window.shape {shape}", window={"shape": shape})
        if changed is None:
            return
        spec = changed
        yield ", ".join(words), spec
