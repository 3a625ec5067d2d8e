"""The commands as a user types them."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.image import imread

from sfm.spec import SfmError
from sfm.survey import cli
from sfm.survey.clients import SurveyError
from sfm.survey.mdio import open_survey
from sfm.survey.preview import preview_png, section
from sfm.survey.transfers import Transfers
from tests.survey.conftest import write_v0, write_v1

MASK = np.ones((20, 24), bool)
MASK[:4, :6] = False


def run(command: object, *arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def url(tmp_path: Path) -> str:
    values = np.random.default_rng(0).standard_normal((20, 24, 30)).astype("f4")
    return write_v1(tmp_path / "s.mdio", values, MASK)


def test_info(url: str) -> None:
    out = run(cli.survey, "info", url)
    assert "format       MDIO v1, Zarr v3" in out
    assert "crossline    24 positions, 100 to 146, step 2" in out
    assert "time         30 positions, 100 to 158 ms, step 2 ms" in out
    assert "chunks       125 of 4 x 5 x 6, zstd" in out
    assert "live traces  456 of 480 (95.0%)" in out
    assert "estimated    central 99.5 % within -" in out
    assert "stored       count 4, mean 2, std 1, min 0, max 3" in out
    assert "but          stored m" in out
    assert "stored min 0 is wrong: more than 0.25 % of the amplitudes lie below it, lowest -" in out
    assert "; stored count 4 covers 0.00029 of the 13,680 voxels on live traces" in out


def test_info_as_json(url: str, tmp_path: Path) -> None:
    found = json.loads(run(cli.survey, "info", url, "--json"))
    assert found["shape"] == [20, 24, 30]
    assert found["axes"][2] == {"name": "time", "unit": "ms", "size": 30, "first": 100, "last": 158, "step": 2}
    assert found["estimated_statistics"]["std"] == pytest.approx(1, abs=0.05)
    old = write_v0(
        tmp_path / "old.mdio", np.random.default_rng(0).random((5, 6, 7)).astype("f4"), np.ones((5, 6), bool)
    )
    found = json.loads(run(cli.survey, "info", old, "--json"))
    assert found["format"] == "MDIO v0, Zarr v2"
    assert found["stored_statistics"] == {"mean": 0.5, "std": 2.0}


def test_stats(url: str) -> None:
    out = run(cli.survey, "stats", url, "--chunks", "50")
    assert "read         50 of 120 chunks with live traces: 5,736 voxels with data" in out
    assert "95.0% of the traces are live" in out
    assert "percentiles  0.1 %: -" in out
    lines = out.splitlines()
    assert [line.split()[2] for line in lines if line.startswith(("min ", "max ", "std "))] == ["0", "3", "1"]
    assert sum(line.startswith("but  ") for line in lines) >= 3  # min, mean and count
    found = json.loads(run(cli.survey, "stats", url, "--json", "--clip", "90"))
    assert found["estimated_statistics"]["clip_percent"] == 90
    assert found["estimated_statistics"]["high"] == pytest.approx(1.645, abs=0.1)
    assert found["distribution"]["percentiles"]["50"] == pytest.approx(0, abs=0.05)
    assert len(found["disagreements"]) == 4


def test_stats_without_anything_to_object_to(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((5, 6, 7)).astype("f4") * 2 + 0.5
    old = write_v0(tmp_path / "old.mdio", values, np.ones((5, 6), bool))
    assert "stored       nothing read here contradicts the stored statistics" in run(cli.survey, "stats", old)
    assert "\nbut " not in run(cli.survey, "info", old)


def test_clip_is_a_percentage(url: str) -> None:
    result = CliRunner().invoke(cli.survey, ["stats", url, "--clip", "101"])
    assert result.exit_code == 2
    assert "101.0 is not in the range 0<x<=100" in result.output


@pytest.mark.parametrize("colours", ["grey", "seismic"])
def test_preview(url: str, tmp_path: Path, colours: str) -> None:
    out = tmp_path / "p.png"
    run(cli.survey, "preview", url, "-o", str(out), "--colours", colours, "--inline", "110", "--slice", "121.2")
    picture = imread(out)
    assert picture.shape[0] > 500
    assert picture.shape[1] > 1500
    coloured = np.abs(picture[..., 0] - picture[..., 2]) > 0.5
    assert (coloured.mean() > 0.1) == (colours == "seismic")


def test_preview_shows_no_data_in_a_colour_of_its_own(url: str) -> None:
    picture = imread(io.BytesIO(preview_png(open_survey(url), (None, None, None))))
    ground = np.isclose(picture[..., :3], np.array([0xD9, 0xD4, 0xC7]) / 255, atol=0.01).all(-1)
    assert 0.001 < ground.mean() < 0.05


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_sections_are_slices_of_the_survey(tmp_path: Path, version: str) -> None:
    values = np.random.default_rng(0).standard_normal((20, 24, 30)).astype("f4")
    values[3, 7:9] = 0  # traces that SEG-Y carried along for dead ones
    values[5, 5, 5] = np.inf
    opened = open_survey((write_v1 if version == "v1" else write_v0)(tmp_path / "s.mdio", values, MASK))
    expected = np.where(MASK[..., None] & np.isfinite(values), values, np.float32(np.nan))
    np.testing.assert_array_equal(section(opened, 2, 11), expected[:, :, 11])
    expected[3, 7:9] = np.nan
    np.testing.assert_array_equal(section(opened, 0, 3), expected[3])
    np.testing.assert_array_equal(section(opened, 1, 5), expected[:, 5])


def test_a_section_needs_no_more_memory_than_it_is_given(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, peak = open_survey(url), 0
    transfers = Transfers(memory=3 * opened.layout.codec.bytes)
    take = transfers.take

    def watch(size: int) -> None:
        nonlocal peak
        take(size)
        peak = max(peak, transfers._taken)

    monkeypatch.setattr(transfers, "take", watch)
    assert section(opened, 2, 0, transfers).shape == (20, 24)
    transfers.close()
    assert 0 < peak <= transfers.memory


def test_a_section_that_cannot_be_read(url: str) -> None:
    before = threading.active_count()
    (Path(url) / "amplitude/c/2/2/2").write_bytes(b"x")
    with pytest.raises(SurveyError, match=r"s.mdio: chunk \(2, 2, 2\) cannot be read: .*; ingest the survey again if"):
        preview_png(open_survey(url), (None, None, None))
    assert threading.active_count() == before


def test_info_on_a_survey_with_nothing_to_learn_from(tmp_path: Path) -> None:
    dead = write_v1(tmp_path / "d.mdio", np.ones((4, 4, 4), "f4"), np.zeros((4, 4), bool))
    equal = write_v1(tmp_path / "e.mdio", np.ones((4, 4, 4), "f4"))
    for url, reason in ((dead, "the survey is empty"), (equal, "there is nothing to learn from")):
        done = CliRunner().invoke(cli.survey, ["info", url], catch_exceptions=False)
        assert done.exit_code == 0
        assert re.search(r"^inline +4 positions", done.output, re.MULTILINE)
        assert re.search(rf"^but +{url}: .*{reason}", done.output, re.MULTILINE)
        found = json.loads(CliRunner().invoke(cli.survey, ["info", url, "--json"]).output)
        assert (found["shape"], found["estimated_statistics"]) == ([4, 4, 4], None)


def test_preview_of_dead_traces_alone(tmp_path: Path) -> None:
    dead = write_v1(tmp_path / "d.mdio", np.ones((4, 4, 4), "f4"), np.zeros((4, 4), bool))
    assert imread(io.BytesIO(preview_png(open_survey(dead), (None, None, None)))).shape[0] > 500


def test_preview_outside(url: str) -> None:
    with pytest.raises(SurveyError, match=r"time 500 lies outside the survey: 100 to 158 ms"):
        preview_png(open_survey(url), (None, None, 500))


def test_preview_unwritable(url: str, tmp_path: Path) -> None:
    with pytest.raises(SfmError, match=r"cannot write .*absent/p.png: No such file or directory"):
        run(cli.survey, "preview", url, "-o", str(tmp_path / "absent" / "p.png"))


def test_synth(tmp_path: Path) -> None:
    out = run(cli.synth, str(tmp_path / "s.sgy"), "--size", "20,24,64", "--salt")
    assert "20 x 24 x 64 every 4 ms" in out
    assert "salt" in out
    assert (tmp_path / "s.geology.json").exists()
    result = CliRunner().invoke(cli.synth, [str(tmp_path / "s.sgy"), "--size", "20,24"])
    assert "'20,24' is not three positive whole numbers" in result.output


def test_ingest_says_what_is_wrong(tmp_path: Path) -> None:
    run(cli.synth, str(tmp_path / "s.sgy"), "--size", "16,16,64")
    with pytest.raises(SfmError, match=r"try --inline-byte 189 --crossline-byte 193"):
        run(cli.ingest, str(tmp_path / "s.sgy"), str(tmp_path / "s.mdio"), "--inline-byte", "205")


def test_devstore_serves_until_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from sfm.cli import main; main()", "devstore", str(tmp_path), "--bucket", "lab"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        environment = dict(line.removeprefix("export ").strip().split("=", 1) for line in lines)
        assert set(environment) >= {"AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
        look = "import s3fs; print(s3fs.S3FileSystem().ls(''))"
        out = subprocess.run(
            [sys.executable, "-c", look], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert out.stdout.strip() == "['lab']", out.stderr


def test_devstore_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SfmError, match=r"file/sub: cannot be made: Not a directory; choose a folder"):
        run(cli.devstore, str(tmp_path / "file" / "sub"))
