"""Synthetic surveys: the same bytes for a seed, real headers, and geology that shows in the amplitudes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sfm.survey import segy
from sfm.survey.clients import SurveyError
from sfm.survey.synth import Recipe, synthesise

SMALL = (48, 40, 128)


def samples(path: Path) -> np.ndarray:
    file = segy.inspect(path)
    raw = np.memmap(path, np.uint8, "r", offset=3600).reshape(file.traces, file.trace_bytes)
    return np.ascontiguousarray(raw[:, 240:]).view(">f4").astype("f4")


def test_bytes_depend_on_the_recipe_alone(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synthesise(tmp_path / f"{name}.sgy", Recipe(seed=seed, size=SMALL))
    a, b, c = ((tmp_path / f"{name}.sgy").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    assert (tmp_path / "a.geology.json").read_bytes() == (tmp_path / "b.geology.json").read_bytes()


def test_headers(tmp_path: Path) -> None:
    geology = synthesise(tmp_path / "s.sgy", Recipe(size=SMALL, interval=2, frequency=40))
    text = (tmp_path / "s.sgy").read_bytes()[:3200].decode("cp037")
    assert text.startswith("C 1 CLIENT: NONE - SYNTHETIC SURVEY")
    assert text[38 * 80 :] == f"{'C39 SEG Y REV1':80s}{'C40 END TEXTUAL HEADER':80s}"
    file = segy.inspect(tmp_path / "s.sgy")
    assert (file.format_name, file.samples, file.interval, file.traces) == ("IEEE float32", 128, 2, 48 * 40)
    assert set(file.header(109, "i2")) == {400}
    assert set(file.header(71, "i2")) == {-100}
    grid = segy.check_lines(file, 189, 193)
    assert (grid.inlines, grid.crosslines) == ((1001, 1048, 48), (2001, 2040, 40))
    x, y = (file.header(byte).reshape(48, 40) / 100 for byte in (181, 185))
    assert np.hypot(np.diff(x, axis=0), np.diff(y, axis=0)) == pytest.approx(geology["grid"]["bin_m"], abs=0.02)
    azimuth = np.rad2deg(np.arctan2(x[-1, 0] - x[0, 0], y[-1, 0] - y[0, 0]))
    assert azimuth == pytest.approx(geology["grid"]["inline_azimuth_deg"], abs=0.1)


def test_layers_are_coherent_and_noise_is_as_stated(tmp_path: Path) -> None:
    synthesise(tmp_path / "s.sgy", Recipe(size=SMALL, dead=0))
    cube = samples(tmp_path / "s.sgy").reshape(SMALL)
    assert np.sqrt((cube**2).mean()) == pytest.approx(1000 * np.sqrt(1 + 1 / 25), rel=0.02)
    neighbours = np.corrcoef(cube[:, 1:].ravel(), cube[:, :-1].ravel())[0, 1]
    assert neighbours > 0.8
    quiet = tmp_path / "q.sgy"
    synthesise(quiet, Recipe(size=SMALL, dead=0, signal_to_noise=1e6))
    noise = cube - samples(quiet).reshape(SMALL)
    assert np.sqrt((noise**2).mean()) == pytest.approx(200, rel=0.01)


def test_dead_and_missing_traces(tmp_path: Path) -> None:
    geology = synthesise(tmp_path / "s.sgy", Recipe(size=SMALL, dead=7, missing=True))
    file = segy.inspect(tmp_path / "s.sgy")
    assert file.traces == round(geology["live_share"] * 48 * 40)
    assert 0.6 < geology["live_share"] < 0.98
    dead = file.header(29, "i2") == 2
    assert (samples(tmp_path / "s.sgy")[dead] == 0).all()
    places = np.stack([file.header(189)[dead], file.header(193)[dead]], axis=1)
    assert sorted(map(tuple, places.tolist())) == sorted(map(tuple, geology["dead_traces"]))
    assert len(places) == 7


def test_geology_is_told(tmp_path: Path) -> None:
    synthesise(tmp_path / "s.sgy", Recipe(size=SMALL, salt=True))
    told = json.loads((tmp_path / "s.geology.json").read_text())
    assert 5 <= len(told["faults"]) <= 7
    assert any(f["cuts_unconformity"] for f in told["faults"])
    assert all(50 <= f["dip_deg"] <= 68 and f["throw_ms"] > 0 for f in told["faults"])
    assert told["salt"]["top"] < told["salt"]["base"]
    assert told["recipe"]["seed"] == 0
    assert len(told["channel"]["centre_line_m"]) > 3


def test_impossible_recipes() -> None:
    with pytest.raises(
        SurveyError, match=r"interval 10 ms carries frequencies up to 50 Hz; a wavelet of 30 Hz needs more"
    ):
        Recipe(interval=10)
    with pytest.raises(SurveyError, match=r"at least 16 positions along each axis"):
        Recipe(size=(8, 64, 64))


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SurveyError, match=r"cannot write .*file/s.sgy: "):
        synthesise(tmp_path / "file" / "s.sgy", Recipe(size=(16, 16, 64)))
