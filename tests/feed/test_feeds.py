"""Ray Data and threads give the same windows in the same order, bit for bit; a dead reader changes nothing."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import zarr

from sfm.feed.direct import direct_feed
from sfm.feed.order import RankOrder
from sfm.feed.ray_data import ray_feed
from sfm.feed.source import SampleSource
from sfm.spec import parse_spec
from sfm.survey.mdio import open_survey
from sfm.survey.statistics import estimate


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
