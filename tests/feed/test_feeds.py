"""Ray Data and threads give the same windows in the same order, bit for bit; a dead reader changes nothing."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from sfm.feed.direct import direct_feed
from sfm.feed.order import RankOrder
from sfm.feed.ray_data import ITERATING, _Reader, ray_feed
from sfm.feed.source import SampleSource
from sfm.spec import parse_spec
from sfm.survey.mdio import open_survey
from sfm.survey.meter import Reading
from sfm.survey.statistics import estimate
from sfm.train.step import CPU, MicroBatch


@pytest.fixture(scope="module")
def survey(tmp_path_factory):
    """A small MDIO v1 store, written by plain Zarr."""
    path = tmp_path_factory.mktemp("survey") / "a.mdio"
    rng = np.random.default_rng(0)
    group = zarr.open_group(path, mode="w")
    group.attrs["apiVersion"] = "1.1.3"
    group.attrs["attributes"] = {"defaultVariableName": "amplitude"}
    shape, names = (30, 50, 64), ("inline", "crossline", "time")
    amplitude = group.create_array(
        "amplitude", shape=shape, chunks=(16, 16, 32), dtype="f4", fill_value=np.nan, dimension_names=names
    )
    values = rng.normal(size=shape).astype(np.float32)
    values[4, 7] = np.nan
    amplitude[:] = values
    for name, size in zip(names, shape, strict=True):
        group.create_array(name, data=np.arange(size, dtype=np.int32), dimension_names=(name,))
    group.create_array("trace_mask", data=~np.isnan(values[:, :, 0]), dimension_names=names[:2])
    return str(path)


def job(survey, **fields):
    return parse_spec(
        {
            "surveys": [{"url": survey}],
            "window": {"shape": [8, 12, 16]},
            "model": {"preset": "tiny", "patch": [2, 4, 4]},
            "parallel": {"workers": 4, "context": 2},
            "batch": {"size": 6, "micro": 3},
            **fields,
        }
    )


def source_of(spec, rows):
    statistics = [estimate(open_survey(spec.surveys[0].url), spec.window.clip, spec.seed).to_json()]
    return SampleSource(spec, statistics, rows), statistics


def equal(one, two):
    """What reading cost aside, which depends on what lay in the cache."""
    names = one.keys() - {"reading"}
    return one.keys() == two.keys() and all(np.array_equal(one[k], two[k], equal_nan=k == "voxels") for k in names)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_direct_feed_equals_asking_one_by_one(survey, ahead):
    spec = job(survey)
    source, _ = source_of(spec, range(2, 4))
    order = RankOrder.of(spec, 1)
    found = list(direct_feed(source, order, 3, 15, spec.micro_batch, ahead))
    assert len(found) == 4
    for number, batch in enumerate(found):
        assert equal(batch, source.training([order.sample(3 + number * 3 + k) for k in range(3)]))


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 2e-3), ("bfloat16", 1e-2)])
def test_short_number_formats_round_the_same_windows(survey, dtype, bound):
    exact = MicroBatch.of(source_of(job(survey), range(4))[0].training([5, 6])).voxels
    short = MicroBatch.of(
        source_of(job(survey, window={"shape": [8, 12, 16], "dtype": dtype}), range(4))[0].training([5, 6])
    )
    assert str(short.voxels.dtype) == f"torch.{dtype}"
    assert torch.equal(short.voxels.isnan(), exact.isnan())
    torch.testing.assert_close(short.to(CPU).voxels, exact, rtol=bound, atol=1e-4, equal_nan=True)


def test_reading_is_counted_once(survey):
    source, _ = source_of(job(survey), range(4))
    order = RankOrder.of(source.spec, 0)
    batches = list(direct_feed(source, order, 0, 30, 4, ahead=3))
    assert [len(batch["voxels"]) for batch in batches] == [4] * 7 + [2]
    counted = Reading.of_rows(np.concatenate([batch["reading"] for batch in batches]))
    seen = source.transfers.meter.now()
    assert counted.bytes_fetched == seen.bytes_fetched > 0
    assert counted.cache_hits + counted.cache_misses == seen.cache_hits + seen.cache_misses >= 30


def test_a_job_with_another_batch_size_goes_on_behind_what_was_consumed():
    before = [RankOrder(6, 2, rank).sample(at) for rank in range(2) for at in range(3 * 4)]
    after = [RankOrder(8, 4, rank, first=24).sample(at) for rank in range(4) for at in range(2 * 5)]
    assert sorted(before) == list(range(24))
    assert sorted(after) == list(range(24, 24 + 40))


def test_slabs_of_a_sample_make_up_the_window(survey):
    spec = job(survey)
    whole, _ = source_of(spec, range(4))
    one, two = whole.training([5]), [source_of(spec, rows)[0].training([5]) for rows in (range(2), range(2, 4))]
    for name, axis in (("voxels", 1), ("visible", 1), ("masked", 1)):
        assert np.array_equal(one[name], np.concatenate([part[name] for part in two], axis), equal_nan=True)


def test_training_predicts_a_share_of_the_masked_tokens_and_evaluation_all(survey):
    cross = {"preset": "tiny", "patch": [2, 4, 4], "decoder_attention": "cross", "decode_share": 0.25}
    source, _ = source_of(job(survey, model=cross), range(4))
    visible, masked = source.mask(5)
    assert len(visible) + len(masked) == source.spec.tokens
    trained = source.training([5, 6])
    assert np.array_equal(trained["visible"][0], visible)
    assert trained["masked"].shape == (2, 4 * 2)  # of the nine in each of four patch rows
    assert set(trained["masked"][0]) < set(masked)


@pytest.fixture(scope="module")
def connected():
    """A Ray of this process's own, with room for a reader and nothing else: that actor may be killed."""
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False)
    yield ray
    ray.shutdown()


@pytest.mark.usefixtures("connected")
def test_ray_feed_equals_direct_feed_even_when_its_reader_dies(survey, monkeypatch):
    monkeypatch.setattr("sfm.feed.ray_data.BLOCK_BYTES", 4 * 4 * 12 * 16 * 3)  # a block for each micro-batch
    spec = job(survey, resources={"reader_cpus": 1})
    source, statistics = source_of(spec, range(2, 4))
    order = RankOrder.of(spec, 1)
    expected = direct_feed(source, order, 6, 126, spec.micro_batch, ahead=2)
    for number, batch in enumerate(ray_feed(spec, statistics, source.rows, order, 6, 126)):
        assert equal(batch, next(expected)), f"micro-batch {number}"
        if number == 5:
            os.kill(_reader_pid(), signal.SIGKILL)
    assert number == 39
    assert next(expected, None) is None


@pytest.mark.usefixtures("connected")
def test_what_lies_ahead_keeps_within_its_budget(survey, tmp_path, monkeypatch):
    """The rank stops; the reader stops too, once the blocks that may lie ahead do."""
    asked = tmp_path / "asked"
    monkeypatch.setattr("sfm.feed.ray_data._Reader", _counting_reader(asked))
    spec = job(survey, batch={"size": 512}, parallel={"workers": 1}, resources={"reader_cpus": 1, "ahead_mib": 12})
    source, statistics = source_of(spec, range(4))
    batches = ray_feed(spec, statistics, source.rows, RankOrder.of(spec, 0), 0, 512 * 60)
    block = 512 * 4 * 8 * 12 * 16  # bytes: a micro-batch, 3 MiB
    next(batches)
    assert ITERATING in [thread.name for thread in threading.enumerate()]
    deadline, seen, since = time.monotonic() + 60, 0, time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - since < 4:  # until it has made none for a while
        now = len(asked.read_text())
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.1)
    batches.close()
    assert ITERATING not in [thread.name for thread in threading.enumerate()]
    # In the store, in hand, in the rank's two prefetched batches, and the two that the actor reads by itself.
    assert 2 <= seen <= 12 * 2**20 // block + 2 + 2 + 2
    assert seen < 30  # of 60


def _counting_reader(path):
    class Counting(_Reader):
        def __call__(self, numbers):
            with path.open("a") as file:
                file.write("x")
            return super().__call__(numbers)

    return Counting


def _reader_pid():
    """Process of the reader actor, which Ray names in its title."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                title = Path(entry.path, "cmdline").read_text()
            except OSError:
                continue  # ended meanwhile
            if title.startswith("ray::") and "_Reader" in title:
                return int(entry.name)
    raise AssertionError("no reader actor runs")
