"""What does a window of a survey cost to read from S3, next to the ways in which others would read it?

One MDIO v1 survey of 512 x 512 x 512 float32 in chunks of 128 x 128 x 128, as MDIO writes it (Blosc: zstd, level 5,
shuffled), uncompressed, and in ZFP (all lengths halved). Amplitudes are band-limited random reflectivity with
full mantissas, so that Blosc packs them about as well as it does recorded data. The server (`benchmarks/bucket.py`) is
on this machine. Readers take turns; each works in a process of its own, which has opened the survey and read nothing
from it, and reads the same windows of 256 x 256 x 256 as the others, one after the other. All must give the same bits,
or there is no result. The first window opens connections and has the system hand out memory that later ones use again:
what is measured without it stands beside, as "warm".

Compared are decoded bytes of windows for each second of processor time (user and system, of the reading process alone,
from the first window asked for to the last one had). On a machine that trains, reading takes its processors from the
rest of the input, and wall time depends on the network; it is reported too. The readers, each with its defaults:

    ours         sfm.survey.reader.WindowReader, nothing kept between windows; the heap keeps its pages, as in a reader actor
    s3fs         zarr over s3fs
    obstore      zarr over obstore
    zarrs        zarr with the pipeline of zarrs, which fetches and decodes in Rust
    tensorstore  TensorStore's zarr3 driver over its own S3 client
    xarray       multidimio's open_mdio: xarray and dask over zarr and s3fs
    limit        no reader: fetch whole every chunk that a window touches (obstore, eight at a time), and decode it
                 (numcodecs, one thread) into the same memory each time, in a heap that keeps its pages, too. Nothing is
                 put in its place, so whoever reads whole chunks cannot get there; who fetches and decodes parts of chunks
                 may get beyond.
    bare limit   the same, fetched over http by the standard library into memory that is there already: what a reader
                 of whole chunks could reach at most

    make bench-read      last line: {"vs_s3fs": their processor seconds / ours, ..., "of_limit": the limit's / ours,
                         "of_bare_limit": likewise, ...}: windows anywhere, Blosc, http. The same ratios for windows on
                         chunk borders, other encodings and https are in "aligned", "uncompressed", "zfp" and "tls", all
                         five without the first window in "warm"; null: it cannot read it

Ratios are taken within a round, where the machine is the same for all, then their median.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import http.client
import itertools
import json
import multiprocessing as mp
import os
import resource
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from benchmarks.bucket import Bucket

Index = tuple[int, int, int]
Read = Callable[[Index], np.ndarray]
"""Reads the window that begins at a voxel."""

BUCKET, REGION, ARRAY = "surveys", "us-east-1", "amplitude"
PATIENCE = 120  # seconds that a reader may take for its windows
WINDOW_SEED = 100


class Case(NamedTuple):
    """What is read, and how."""

    survey: str = "blosc"
    aligned: bool = False
    """Windows begin and end where chunks do."""
    tls: bool = False


CASES = {
    "random": Case(),
    "aligned": Case(aligned=True),
    "uncompressed": Case("uncompressed"),
    "zfp": Case("zfp"),
    "tls": Case(tls=True),
}


class Sizes(NamedTuple):
    """Of the survey, along each axis, in voxels."""

    size: int
    chunk: int
    window: int

    def of(self, survey: str) -> Sizes:
        """ZFP decodes so slowly that half is enough."""
        return Sizes(*(n // 2 for n in self)) if survey == "zfp" else self

    def origins(self, count: int, seed: int, *, aligned: bool) -> list[Index]:
        """Where windows begin."""
        last = self.size - self.window
        starts = [n for n in range(last + 1) if (n % self.chunk == 0) == aligned]
        i, x, t = np.random.default_rng(seed).choice(starts, (3, count)).tolist()
        return list(zip(i, x, t, strict=True))

    def touched(self, origin: Index) -> list[str]:
        """Keys of the chunks that a window meets."""
        ranges = [range(o // self.chunk, (o + self.window - 1) // self.chunk + 1) for o in origin]
        return [f"{ARRAY}/c/{i}/{x}/{t}" for i, x, t in itertools.product(*ranges)]


class Place(NamedTuple):
    """A survey as clients find it."""

    endpoint: str
    ca_file: str | None
    survey: str
    window: int

    @property
    def s3fs(self) -> dict[str, Any]:
        return {"anon": True, "endpoint_url": self.endpoint, "client_kwargs": {"region_name": REGION}}

    def rust(self) -> Any:
        """A store of obstore. It takes the authority from SSL_CERT_FILE, as the store that zarrs makes of it must."""
        from obstore.store import S3Store

        trust: dict[str, Any] = {"allow_http": not self.ca_file}
        where: dict[str, Any] = {"endpoint": self.endpoint, "region": REGION, "client_options": trust}
        return S3Store(BUCKET, prefix=f"{self.survey}.mdio", skip_signature=True, **where)

    def box(self, origin: Index) -> tuple[slice, ...]:
        return tuple(slice(o, o + self.window) for o in origin)


class UnreadableError(Exception):
    """A reader cannot read this survey."""


def read_ours(place: Place) -> Read:
    from sfm.spec import Storage
    from sfm.survey.heap import keep_pages
    from sfm.survey.mdio import open_survey
    from sfm.survey.reader import WindowReader

    keep_pages()  # as reader actors do
    storage = Storage(endpoint_url=place.endpoint, region=REGION, anonymous=True)
    survey = open_survey(f"s3://{BUCKET}/{place.survey}.mdio", storage)
    reader = WindowReader(survey, None, keep=False)
    shape = (place.window, place.window, place.window)
    return lambda origin: reader.read(origin, shape)


def read_s3fs(place: Place) -> Read:
    import zarr

    array: Any = zarr.open_array(f"s3://{BUCKET}/{place.survey}.mdio/{ARRAY}", mode="r", storage_options=place.s3fs)
    return lambda origin: array[place.box(origin)]


def read_obstore(place: Place) -> Read:
    import zarr
    from zarr.storage import ObjectStore

    array: Any = zarr.open_array(ObjectStore(place.rust(), read_only=True), path=ARRAY, mode="r")
    return lambda origin: array[place.box(origin)]


def read_zarrs(place: Place) -> Read:
    import zarr
    import zarrs  # noqa: F401 - registers the pipeline

    # Strict: otherwise it would have zarr decode what it cannot, and be measured for it.
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": True})
    try:
        return read_obstore(place)
    except Exception as error:
        if type(error).__name__ != "UnsupportedMetadataError":
            raise
        raise UnreadableError(f"zarrs {version('zarrs')} does not know the codec: {error.__cause__}") from None


def read_tensorstore(place: Place) -> Read:
    import tensorstore

    store = {
        "driver": "s3",
        "bucket": BUCKET,
        "path": f"{place.survey}.mdio/{ARRAY}/",
        "endpoint": place.endpoint,
        "aws_region": REGION,
        "aws_credentials": {"type": "anonymous"},
    }
    try:
        array = tensorstore.open({"driver": "zarr3", "kvstore": store}, read=True, open=True).result()
    except ValueError as error:
        if "codec" not in str(error):
            raise
        raise UnreadableError(f"TensorStore {version('tensorstore')} does not know the codec") from None
    return lambda origin: array[place.box(origin)].read().result()


def read_xarray(place: Place) -> Read:
    from mdio import open_mdio
    from upath import UPath

    data = open_mdio(UPath(f"s3://{BUCKET}/{place.survey}.mdio", **place.s3fs), chunks={})[ARRAY]
    return lambda origin: data.isel(dict(zip(data.dims, place.box(origin), strict=True))).compute().values


READERS = {
    "ours": read_ours,
    "s3fs": read_s3fs,
    "obstore": read_obstore,
    "zarrs": read_zarrs,
    "tensorstore": read_tensorstore,
    "xarray": read_xarray,
}
LIMIT, BARE = "limit", "bare limit"
PRELOAD = ["dask.array", "mdio", "s3fs", "sfm.survey.mdio", "sfm.survey.reader", "upath", "xarray", "zarr"]
"""Imported once, by the process that others are forked from; what brings threads of its own is not among them."""


class Spent(NamedTuple):
    """Seconds of a process."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Spent:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(time.perf_counter(), used.ru_utime + used.ru_stime)

    def since(self, began: Spent) -> Spent:
        return Spent(self.wall - began.wall, self.cpu - began.cpu)


def time_reader(name: str, place: Place, origins: list[Index]) -> tuple[list[Spent], str]:
    """Runs in a process of its own: what each window took, and what they hold as one sum."""
    read = READERS[name](place)
    spent, digest = [], hashlib.sha256()
    for origin in origins:
        began = Spent.now()
        window = read(origin)
        spent.append(Spent.now().since(began))
        digest.update(np.ascontiguousarray(window, "<f4").data)
        del window  # before the next one is read: nobody needs memory for two
    return spent, digest.hexdigest()


async def fetch_all(store: Any, touched: list[list[str]]) -> list[Spent]:
    """Fetch these objects, eight at a time, and forget them. A thread that waits for a body is woken for each part of
    it, over TLS every 16 KiB; here the threads of obstore put it together among themselves."""
    import obstore

    await obstore.get_async(store, f"{ARRAY}/zarr.json")  # connects, as readers do when they open
    turns, spent = asyncio.Semaphore(8), []

    async def fetch(key: str) -> None:
        async with turns:
            await (await obstore.get_async(store, key)).bytes_async()

    for keys in touched:
        began = Spent.now()
        await asyncio.gather(*map(fetch, keys))
        spent.append(Spent.now().since(began))
    return spent


def time_bare(place: Place, touched: list[list[str]]) -> list[Spent]:
    """Runs in a process of its own: fetching these objects in eight threads that do nothing else, over http."""
    own, spent = threading.local(), []
    host, together = urlsplit(place.endpoint).netloc, threading.Barrier(8)

    def connect(_: int) -> None:
        own.connection, own.room = http.client.HTTPConnection(host), memoryview(bytearray(2**24))
        own.connection.connect()
        together.wait()  # so that each thread does this once

    def fetch(key: str) -> None:
        own.connection.request("GET", f"/{BUCKET}/{place.survey}.mdio/{key}")
        answer = own.connection.getresponse()
        size, at = int(answer.headers["Content-Length"]), 0
        while at < size:
            got = answer.readinto(own.room[at:size])
            if not got:
                raise ConnectionError(f"{key} ended after {at} of {size} bytes")
            at += got

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(connect, range(8)))
        for keys in touched:
            began = Spent.now()
            list(threads.map(fetch, keys))
            spent.append(Spent.now().since(began))
    return spent


def time_limit(place: Place, folder: Path, touched: list[list[str]]) -> tuple[list[Spent], list[Spent]]:
    """Runs in a process of its own: fetching the chunks of each window, and decoding them."""
    import numcodecs

    from sfm.survey.heap import keep_pages

    keep_pages()  # as ours does: its heap is not what is compared
    fetching, decoding = asyncio.run(fetch_all(place.rust(), touched)), []
    numcodecs.blosc.use_threads = False
    survey = folder / BUCKET / f"{place.survey}.mdio"
    room = np.empty(len((survey.with_name("uncompressed.mdio") / touched[0][0]).read_bytes()), np.uint8)
    for keys in touched:
        stored = [(survey / key).read_bytes() for key in keys]
        began = Spent.now()
        for data in stored:
            if place.survey == "blosc":
                numcodecs.blosc.decompress(data, room)
            elif place.survey == "zfp":
                numcodecs.ZFPY().decode(data)
        decoding.append(Spent.now().since(began))
    return fetching, decoding


def _child(pipe: Connection, trust: str | None, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")  # that ZFP is in no Zarr specification, that zarrs makes a store of its own
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    if trust is not None:
        os.environ.update(AWS_CA_BUNDLE=trust, SSL_CERT_FILE=trust)
    try:
        pipe.send(work(*args))
    except UnreadableError as error:
        pipe.send(error)


def alone(trust: str | None, work: Callable[..., Any], *args: Any) -> Any:
    """What `work` returns in a new process.

    Args:
        trust: certificate of the authority that clients are to trust.

    Raises:
        UnreadableError: the reader cannot read this survey.
        SystemExit: it failed, or took longer than `PATIENCE`.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, trust, work, args))
    process.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE):
            raise SystemExit(f"no result: {work.__name__} of {args[0]} took longer than {PATIENCE} s")
        found = ours.recv()
        process.join(5)
    except EOFError:
        raise SystemExit(f"no result: {work.__name__} of {args[0]} failed; see above") from None
    finally:
        process.kill()
        process.join()
    if isinstance(found, UnreadableError):
        raise found
    return found


def write_surveys(folder: Path, sizes: Sizes) -> None:
    """Write the survey in every encoding, unless `folder` has them."""
    import zarr
    from zarr.codecs import BloscCodec
    from zarr.codecs.numcodecs import ZFPY

    done = folder / f"written {sizes.size} {sizes.chunk}"
    if done.is_file():
        return
    encodings: dict[str, dict[str, Any]] = {
        "blosc": {"compressors": BloscCodec(cname="zstd", clevel=5, shuffle="shuffle")},
        "uncompressed": {"compressors": None},
        "zfp": {"compressors": None, "serializer": ZFPY(mode=4, tolerance=0.01)},
    }
    arrays = {}
    for name, codecs in encodings.items():
        size = sizes.of(name).size
        live = live_traces(size, everywhere=name == "zfp")
        group = zarr.open_group(folder / BUCKET / f"{name}.mdio", mode="w", zarr_format=3)
        stacked = {"surveyType": "3D", "gatherType": "stacked", "defaultVariableName": ARRAY}
        group.attrs.update({"apiVersion": "1.1.3", "name": "PostStack3DTime", "attributes": stacked})
        names = ("inline", "crossline", "time")
        for axis in names:
            coordinate = group.create_array(axis, shape=(size,), dtype="int32", dimension_names=(axis,))
            coordinate[...] = np.arange(size)
        mask = group.create_array("trace_mask", shape=live.shape, dtype=bool, dimension_names=names[:2])
        mask[...] = live
        shape, chunks = (size,) * 3, (sizes.of(name).chunk,) * 3
        arrays[name] = group.create_array(
            ARRAY, shape=shape, chunks=chunks, dtype="float32", fill_value=np.nan, dimension_names=names, **codecs
        )
    for first in range(0, sizes.size, sizes.chunk):
        rows = slice(first, min(first + sizes.chunk, sizes.size))
        values = reflectivity(rows, sizes.size)
        for name, array in arrays.items():
            size = array.shape[0]
            if rows.start < size:
                part = values[: size - rows.start, :size, :size].copy()
                part[~live_traces(size, everywhere=name == "zfp")[rows]] = np.nan
                array[rows] = part
    done.touch()


def live_traces(size: int, *, everywhere: bool) -> np.ndarray:
    """Which traces exist, bool (inline, crossline): not those of one corner. ZFP knows no NaN, so there all do."""
    inline, crossline = np.ogrid[:size, :size]
    return (inline + crossline >= (0 if everywhere else size // 4)) & np.ones((size, size), bool)


def reflectivity(rows: slice, size: int) -> np.ndarray:
    """Some inlines of random reflectivity, [rows, size, size] float32 with an rms of 1: continuous from trace to trace,
    and with the band of a Ricker wavelet (30 Hz at 2 ms) along them."""
    noise = np.random.default_rng(rows.start).standard_normal((rows.stop - rows.start, size, size), np.float32)
    for line in range(1, len(noise)):
        noise[line] += 0.8 * noise[line - 1]
    for line in range(1, size):
        noise[:, line] += 0.8 * noise[:, line - 1]
    squared = (np.fft.rfftfreq(size, 0.002) / 30) ** 2
    wavelet = (squared * np.exp(-squared)).astype(np.float32)
    for line in noise:
        line[...] = np.fft.irfft(np.fft.rfft(line) * wavelet, size)
    return noise / noise.std()


class Result(NamedTuple):
    """Of one reader in one round of a case."""

    gigabytes: float
    """Of one window, decoded, in 10^9 bytes."""
    spent: dict[str, list[Spent]]
    """By part of the work, for each window; a reader's is all in one."""
    fetched: float
    """Bytes that the server sent for each byte of the windows."""

    def seconds(self, kind: str, *, warm: bool = False, part: str | None = None) -> float:
        """For a window, on average.

        Args:
            kind: "cpu" or "wall".
            warm: leave out the first window, unless there is no other.
            part: of the work alone.
        """
        parts = [self.spent[part]] if part else self.spent.values()
        return sum(
            statistics.mean(getattr(spent, kind) for spent in (many[1:] if warm and len(many) > 1 else many))
            for many in parts
        )


Round = dict[str, dict[str, Result]]
"""By case, by reader."""


def measure(
    buckets: dict[bool, Bucket], folder: Path, sizes: Sizes, count: int, number: int
) -> tuple[Round, dict[str, dict[str, str]]]:
    """One round: for each case what every reader spent and fetched, and why one does not read it.

    Raises:
        SystemExit: readers do not agree.
    """
    found: Round = {}
    refused: dict[str, dict[str, str]] = {}
    for title, case in CASES.items():
        survey, bucket = sizes.of(case.survey), buckets[case.tls]
        place = Place(bucket.endpoint_url, bucket.ca_file, case.survey, survey.window)
        origins = survey.origins(count, WINDOW_SEED + number, aligned=case.aligned)
        gigabytes = 4 * survey.window**3 / 1e9
        results, sums = found.setdefault(title, {}), {}
        for name in READERS:
            bucket.reset()
            try:
                spent, sums[name] = alone(bucket.ca_file, time_reader, name, place, origins)
                results[name] = Result(gigabytes, {"all": spent}, bucket.stats()["bytes"] / 1e9 / gigabytes / count)
            except UnreadableError as error:
                refused.setdefault(title, {})[name] = str(error)
        if len(set(sums.values())) != 1:
            raise SystemExit(f"no result: the readers do not agree on the same windows ({title}): {sums}")
        bucket.reset()
        touched = [survey.touched(origin) for origin in origins]
        fetching, decoding = alone(bucket.ca_file, time_limit, place, folder, touched)
        parts = {"fetch": fetching} | ({"decode": decoding} if case.survey != "uncompressed" else {})
        results[LIMIT] = Result(gigabytes, parts, bucket.stats()["bytes"] / 1e9 / gigabytes / count)
        if not case.tls:
            bare = parts | {"fetch": alone(None, time_bare, place, touched)}
            results[BARE] = Result(gigabytes, bare, results[LIMIT].fetched)
    return found, refused


def ratios(rounds: list[Round], title: str, *, warm: bool = False) -> dict[str, float | None]:
    """Processor seconds of others over ours."""

    def ratio(name: str) -> float | None:
        many = [
            found[title][name].seconds("cpu", warm=warm) / found[title]["ours"].seconds("cpu", warm=warm)
            for found in rounds
            if name in found[title]
        ]
        return round(statistics.median(many), 3) if many else None

    return {f"vs_{name}": ratio(name) for name in READERS if name != "ours"} | {
        "of_limit": ratio(LIMIT),
        "of_bare_limit": ratio(BARE),
    }


def rates(rounds: list[Round], title: str, kind: str, *, warm: bool = False) -> dict[str, float]:
    """Decoded GB for each of these seconds, by reader."""

    def rate(name: str, part: str | None = None) -> float:
        results = (found[title][name] for found in rounds)
        return round(statistics.median(r.gigabytes / r.seconds(kind, warm=warm, part=part) for r in results), 3)

    by_reader = {name: rate(name) for name in rounds[0][title]}
    limits = {name: rounds[0][title][name].spent for name in (LIMIT, BARE) if name in rounds[0][title]}
    return by_reader | {f"{name}: {part}": rate(name, part) for name, parts in limits.items() for part in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512, help="voxels of the survey along each axis")
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=4, help="windows that a reader reads in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where surveys are kept for the next run; default: they are not")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works; its figures mean nothing")
    options = parser.parse_args()
    if options.quick:
        options.size, options.chunk, options.window, options.windows, options.rounds = 128, 64, 80, 2, 1
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(run(options, options.folder or Path(temporary))))


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    sizes = Sizes(options.size, options.chunk, options.window)
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    write_surveys(folder, sizes)
    rounds, refused, loads = [], {}, []
    with Bucket(folder) as plain, Bucket(folder, tls=True) as encrypted:
        buckets = {False: plain, True: encrypted}
        # A first round warms up: files come into memory, and their sums into the server.
        for number in range(0 if options.quick else -1, options.rounds):
            found, refused = measure(buckets, folder, sizes, options.windows, number)
            if number >= 0:
                rounds.append(found)
                loads.append(os.getloadavg()[0])
            print(f"round {number + 1} of {options.rounds}, load {os.getloadavg()[0]:.2f}", flush=True)
    cpu = {title: rates(rounds, title, "cpu") for title in CASES}
    warm = {title: rates(rounds, title, "cpu", warm=True) for title in CASES}
    wall = {title: rates(rounds, title, "wall") for title in CASES}
    fetched = {
        title: {name: round(statistics.median(f[title][name].fetched for f in rounds), 2) for name in rounds[0][title]}
        for title in CASES
    }
    for title in CASES:
        print(f"{title:15} GB a processor second; without the first window; GB a second; bytes fetched for one read")
        for name, rate in cpu[title].items():
            sent = fetched[title].get(name, "")
            print(f"  {name:17} {rate:18.3f} {warm[title][name]:26.3f} {wall[title][name]:13.3f} {sent:>27}")
        for name, reason in refused.get(title, {}).items():
            print(f"  {name:13} skipped: {reason}")
    return {
        **ratios(rounds, "random"),
        **{title: ratios(rounds, title) for title in CASES if title != "random"},
        "warm": {title: ratios(rounds, title, warm=True) for title in CASES},
        "gb_per_cpu_second": cpu,
        "gb_per_cpu_second_warm": warm,
        "gb_per_second": wall,
        "fetched": fetched,
        "rounds": options.rounds,
        "windows": options.windows,
        **sizes._asdict(),
        "blosc_ratio": round(4 * sizes.size**3 / stored_bytes(folder, "blosc"), 3),
        "zfp_ratio": round(4 * sizes.of("zfp").size ** 3 / stored_bytes(folder, "zfp"), 3),
        "load": [round(load, 2) for load in loads],
        "versions": {
            name: version(name)
            for name in ("zarr", "numcodecs", "s3fs", "obstore", "zarrs", "tensorstore", "xarray", "dask", "multidimio")
        },
    }


def stored_bytes(folder: Path, survey: str) -> int:
    chunks = (folder / BUCKET / f"{survey}.mdio" / ARRAY / "c").rglob("*")
    return sum(path.stat().st_size for path in chunks if path.is_file())


if __name__ == "__main__":
    main()
