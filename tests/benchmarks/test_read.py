"""The benchmark of reading, at a tiny size: that readers are compared on the same bits, and what it prints."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import read

ROOT = Path(__file__).parents[2]
RATIOS = {"vs_s3fs", "vs_obstore", "vs_tensorstore", "vs_zarrs", "vs_xarray", "of_limit", "of_bare_limit"}


def test_a_tiny_run_ends_with_its_figures():
    command = [sys.executable, "-m", "benchmarks.read", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr  # readers that do not agree end it
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() > RATIOS
    for title in ("aligned", "uncompressed", "zfp", "tls"):
        assert found[title].keys() == RATIOS
    for case in (found, found["aligned"], found["uncompressed"]):
        assert all(case[name] > 0 for name in RATIOS)
    assert {name for name, ratio in found["tls"].items() if ratio is None} == {"of_bare_limit"}
    unread = {name for name, ratio in found["zfp"].items() if ratio is None}
    assert unread == {"vs_zarrs", "vs_tensorstore"}
    assert done.stdout.count("skipped: ") == 2
    speeds = found["gb_per_cpu_second"]["random"]
    assert found["vs_s3fs"] == pytest.approx(speeds["ours"] / speeds["s3fs"], rel=0.05)  # one round: no medians
    assert speeds.keys() >= {*read.READERS, "limit", "bare limit"}
    assert 1.1 < found["blosc_ratio"] < 1.4  # as recorded data packs
    assert found["warm"]["random"].keys() == RATIOS
    whole = found["fetched"]["random"]
    assert whole["s3fs"] == pytest.approx(whole["limit"], rel=0.01)


def test_readers_that_disagree_give_no_result(monkeypatch):
    sums = iter("ab" * 100)
    monkeypatch.setattr(read, "alone", lambda *_: ([read.Spent(1, 1)], next(sums)))
    bucket = type("Still", (), {"endpoint_url": "", "ca_file": None, "reset": lambda _: None})()
    bucket.stats = lambda: {"bytes": 1}
    with pytest.raises(SystemExit, match="do not agree"):
        read.measure({False: bucket, True: bucket}, ROOT, read.Sizes(64, 16, 24), 1, 0)


def test_windows_lie_where_they_should():
    sizes = read.Sizes(512, 128, 256)
    for origin in sizes.origins(50, 1, aligned=False):
        assert all(0 < n < 256 and n % 128 for n in origin)
        assert len(sizes.touched(origin)) == 27
    for origin in sizes.origins(50, 1, aligned=True):
        assert all(n in (0, 128, 256) for n in origin)
        assert len(sizes.touched(origin)) == 8
    assert sizes.origins(3, 7, aligned=False) == sizes.origins(3, 7, aligned=False)


def test_the_reflectivity_has_a_band_and_full_mantissas():
    values = read.reflectivity(slice(0, 16), 128)
    assert values.dtype == np.float32
    assert values.std() == pytest.approx(1, rel=0.01)
    power = np.square(np.abs(np.fft.rfft(values))).mean((0, 1))
    hertz = np.fft.rfftfreq(128, 0.002)
    assert 15 < hertz[power.argmax()] < 45
    assert power[0] < 0.01 * power.max()
    low_bits = values.view(np.uint32) & 0xFF
    assert len(np.unique(low_bits)) == 256


def test_what_a_reader_cannot_read_is_told_and_what_fails_ends_it():
    with pytest.raises(read.UnreadableError, match="not this"):
        read.alone(None, refuse)
    with pytest.raises(SystemExit, match="fail"):
        read.alone(None, fail, "it")


def refuse():
    raise read.UnreadableError("not this one")


def fail(name):
    raise ValueError(name)
