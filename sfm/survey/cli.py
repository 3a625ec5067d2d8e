"""`sfm ingest`, `sfm survey`, `sfm synth`, `sfm devstore`."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

if TYPE_CHECKING:
    from sfm.spec import Storage
    from sfm.survey.mdio import Survey
    from sfm.survey.statistics import Distribution, Statistics

# The rooms behind a command are imported when it runs: `sfm --help` must not wait for zarr.


class Sizes(click.ParamType):
    """Three positive whole numbers with commas: inline,crossline,sample."""

    name = "I,X,T"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int, int]:
        if isinstance(value, tuple):
            return value
        try:
            first, second, third = (int(part) for part in str(value).split(","))
        except ValueError:
            first = second = third = 0
        if min(first, second, third) < 1:
            self.fail(f"'{value}' is not three positive whole numbers like 128,128,128", param, ctx)
        return first, second, third


CLIP = click.FloatRange(0, 100, min_open=True)


def _storage_options(command: Any) -> Any:
    """Add the options that describe an object store; `command` takes them as one `storage`."""

    @functools.wraps(command)
    def with_storage(**given: Any) -> Any:
        from sfm.spec import Storage

        stated = {name: given.pop(name) for name in ("endpoint_url", "region", "anonymous", "profile", "client")}
        return command(**given, storage=Storage(**stated))

    for option in (
        click.option(
            "--client", type=click.Choice(["obstore", "s3fs"]), default="obstore", help="Who reads from the store."
        ),
        click.option("--profile", help="Profile of the AWS configuration files; default: AWS_PROFILE."),
        click.option("--anonymous", is_flag=True, help="Read a public bucket without signing."),
        click.option("--region", help="Region of the bucket; default: AWS_REGION."),
        click.option("--endpoint-url", help="URL of an S3-compatible server; default: AWS_ENDPOINT_URL."),
    ):
        with_storage = option(with_storage)
    return with_storage


@click.command()
@click.argument("segy", type=click.Path())
@click.argument("url")
@click.option("--inline-byte", default=189, show_default=True, help="First byte of the inline number (int32).")
@click.option("--crossline-byte", default=193, show_default=True, help="First byte of the crossline number (int32).")
@click.option("--x-byte", default=181, show_default=True, help="First byte of the X coordinate (int32).")
@click.option("--y-byte", default=185, show_default=True, help="First byte of the Y coordinate (int32).")
@click.option("--chunks", type=Sizes(), default="128,128,128", show_default=True, help="Voxels of a chunk.")
@click.option(
    "--domain", type=click.Choice(["time", "depth"]), default="time", show_default=True, help="Vertical axis."
)
@click.option("--overwrite", is_flag=True, help="Replace a survey that is already there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_storage_options
def ingest(
    segy: str,
    url: str,
    inline_byte: int,
    crossline_byte: int,
    x_byte: int,
    y_byte: int,
    chunks: tuple[int, int, int],
    domain: str,
    overwrite: bool,
    as_json: bool,
    storage: Storage,
) -> None:
    """Turn the 3D post-stack SEG-Y file SEGY into MDIO at URL (s3://bucket/name.mdio or a local path)."""
    from sfm.survey.ingest import HeaderBytes
    from sfm.survey.ingest import ingest as run

    done = run(
        segy,
        url,
        where=HeaderBytes(inline_byte, crossline_byte, x_byte, y_byte),
        chunks=chunks,
        domain=cast("Any", domain),
        overwrite=overwrite,
        storage=storage,
    )
    for note in done.notes:
        click.echo(f"note: {note}", err=True)
    survey = done.survey
    if as_json:
        shape = {axis.name: n for axis, n in zip(survey.axes, survey.shape, strict=True)}
        click.echo(
            json.dumps({"url": url, "shape": shape, "live_traces": done.traces, "seconds": round(done.seconds, 2)})
        )
        return
    sizes = " x ".join(f"{n} {axis.name}" for n, axis in zip(survey.shape, survey.axes, strict=True))
    click.echo(f"{url}: {sizes}, {done.traces:,} live traces, {done.seconds:.1f} s")


@click.group()
def survey() -> None:
    """Look at MDIO surveys."""


@survey.command()
@click.argument("url")
@click.option(
    "--clip", default=99.5, show_default=True, type=CLIP, help="Central percentile kept by clipping (percent)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_storage_options
def info(url: str, clip: float, as_json: bool, storage: Storage) -> None:
    """Describe the survey at URL: dimensions, chunks, live traces, statistics."""
    from sfm.survey.describe import facts, sentences
    from sfm.survey.mdio import open_survey
    from sfm.survey.statistics import EmptyError

    opened = open_survey(url, storage)
    try:
        examined: tuple[Statistics, Distribution] | EmptyError = _examined(opened, clip)
    except EmptyError as error:
        examined = error
    found = facts(opened, examined, clip)
    _print(found, sentences(found), as_json)


@survey.command()
@click.argument("url")
@click.option(
    "--clip", default=99.5, show_default=True, type=CLIP, help="Central percentile kept by clipping (percent)."
)
@click.option(
    "--chunks", default=64, show_default=True, type=click.IntRange(1), help="Chunks to read, drawn at random."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_storage_options
def stats(url: str, clip: float, chunks: int, as_json: bool, storage: Storage) -> None:
    """Estimate the amplitude statistics of the survey at URL, and compare them with those that it states itself."""
    from sfm.survey.describe import statistical_facts, statistical_sentences
    from sfm.survey.mdio import open_survey

    opened = open_survey(url, storage)
    found = statistical_facts(opened, *_examined(opened, clip, chunks), clip)
    _print(found, statistical_sentences(found), as_json)


def _examined(opened: Survey, clip: float, chunks: int = 64) -> tuple[Statistics, Distribution]:
    """Statistics, with a progress bar on stderr."""
    from sfm.survey.statistics import examine

    with _progress("estimating statistics", "chunks") as step:
        return examine(opened, clip, max_chunks=chunks, progress=step)


@contextlib.contextmanager
def _progress(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, if that is a terminal; call with (done, in all)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print(found: dict[str, Any], rows: Sequence[tuple[str, str]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found))
        return
    width = max(len(label) for label, _ in rows)
    for label, words in rows:
        click.echo(f"{label:{width}}  {words}")


@survey.command()
@click.argument("url")
@click.option("--window", type=Sizes(), default="128,128,128", show_default=True, help="Voxels of a window.")
@click.option("--most", default=64, show_default=True, type=click.IntRange(1, 1024), help="Requests in flight at most.")
@click.option(
    "--seconds", default=3.0, show_default=True, type=click.FloatRange(0.1), help="For each number in flight."
)
@click.option(
    "--memory",
    default=2048,
    show_default=True,
    type=click.IntRange(1),
    help="Memory for chunks on their way at most (MiB).",
)
@click.option("-o", "--output", type=click.Path(), help="Draw the figures into this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_storage_options
def bench(
    url: str,
    window: tuple[int, int, int],
    most: int,
    seconds: float,
    memory: int,
    output: str | None,
    as_json: bool,
    storage: Storage,
) -> None:
    """Measure how fast this machine reads random windows of the survey at URL, and how many requests in flight it takes."""
    from sfm.survey.mdio import open_survey
    from sfm.survey.rates import Bench, plot_png, saturating, table, verdict

    trial = Bench(open_survey(url, storage, window), window, memory * 2**20)
    with _progress("reading", "trials") as step:
        points = trial.sweep(most, seconds, step)
    said = verdict(points)
    sizes = " x ".join(map(str, trial.window))
    if as_json:
        found = {"url": url, "window": list(trial.window), "saturating": saturating(points).in_flight, "says": said}
        click.echo(json.dumps({**found, "points": [point.to_json() for point in points]}))
    else:
        click.echo(f"{url}, windows of {sizes}")
        for line in (*table(points), *said):
            click.echo(line)
    if output:
        _write(output, plot_png(points, f"{url.rstrip('/').rsplit('/', 1)[-1]}, windows of {sizes}"))


def _write(path: str, data: bytes) -> None:
    from sfm.survey.clients import SurveyError

    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise SurveyError(f"cannot write {path}: {error.strerror}") from None


@survey.command()
@click.argument("url")
@click.option("-o", "--output", default="preview.png", show_default=True, type=click.Path(), help="PNG file to write.")
@click.option("--inline", "at_inline", type=float, help="Inline number to cut at; default: the middle.")
@click.option("--crossline", "at_crossline", type=float, help="Crossline number to cut at; default: the middle.")
@click.option("--slice", "at_sample", type=float, help="Time or depth to cut at; default: the middle.")
@click.option(
    "--colours", type=click.Choice(["grey", "seismic"]), default="grey", show_default=True, help="Colour map."
)
@_storage_options
def preview(
    url: str,
    output: str,
    at_inline: float | None,
    at_crossline: float | None,
    at_sample: float | None,
    colours: str,
    storage: Storage,
) -> None:
    """Draw an inline, a crossline and a time slice of the survey at URL."""
    from sfm.survey.mdio import open_survey
    from sfm.survey.preview import preview_png

    opened = open_survey(url, storage)
    picture = preview_png(opened, (at_inline, at_crossline, at_sample), cast("Any", colours))
    _write(output, picture)
    click.echo(output)


@click.command()
@click.argument("output", type=click.Path())
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same bytes.")
@click.option("--size", type=Sizes(), default="192,192,256", show_default=True, help="Inlines, crosslines, samples.")
@click.option("--interval", default=4.0, show_default=True, help="Sample interval (ms).")
@click.option("--frequency", default=30.0, show_default=True, help="Peak frequency of the wavelet (Hz).")
@click.option("--signal-to-noise", default=5.0, show_default=True, help="Ratio of root mean squares.")
@click.option("--salt", is_flag=True, help="Add a salt diapir.")
@click.option("--missing", is_flag=True, help="Give the survey an irregular outline and a hole.")
@click.option("--dead", default=5, show_default=True, help="Number of dead traces.")
def synth(output: str, **recipe: Any) -> None:
    """Write a synthetic survey with known geology to OUTPUT (.sgy), and the geology beside it (.geology.json)."""
    import time

    from sfm.survey.synth import Recipe, synthesise

    began = time.monotonic()
    wanted = Recipe(**recipe)
    geology = synthesise(output, wanted)
    features = f"{len(geology['faults'])} faults, an unconformity, a channel{', salt' if wanted.salt else ''}"
    click.echo(
        f"{output}: {' x '.join(map(str, wanted.size))} every {wanted.interval:g} ms, {features}, "
        f"{Path(output).stat().st_size / 2**20:,.1f} MiB, {time.monotonic() - began:.1f} s"
    )


@click.command()
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--port", type=int, help="TCP port; default: a free one.")
@click.option("--bucket", default=None, help="Make this bucket if it is not there.")
def devstore(directory: str, port: int | None, bucket: str | None) -> None:
    """Serve DIRECTORY as an S3 object store on this machine until interrupted; its folders are the buckets."""
    from sfm.spec import SfmError
    from sfm.survey.devstore import DevStore

    try:
        Path(directory, bucket or "").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SfmError(f"{directory}: cannot be made: {error.strerror}; choose a folder that you may write") from None

    def leave(*_: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    with DevStore(directory, port) as store:
        for name, value in store.environment.items():
            click.echo(f"export {name}={value}")
        click.echo(f"# serving {directory}; interrupt to stop", err=True)
        store.wait()
