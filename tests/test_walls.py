"""Walls that the import linter cannot see (`make lint` has the others)."""

import subprocess
import sys

import pytest


def test_the_model_knows_nothing_of_other_devices(request):
    for path in (request.config.rootpath / "sfm" / "model").glob("*.py"):
        assert "torch.distributed" not in path.read_text().replace("without Ray or torch.distributed", ""), path


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("sfm.cli, sfm.spec, sfm.plan, service.app, service.cli", "torch, deepspeed, zarr, mdio"),
        ("sfm.survey.cli, sfm.survey.preflight, sfm.survey.reader, sfm.survey.sampler", "torch, ray, fastapi"),
    ],
)
def test_importing_these_brings_in_none_of_those(modules, absent):
    code = f"import sys, {modules}; print(sorted(set('{absent}'.split(', ')) & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_a_missing_extra_is_a_sentence():
    """As where only `sfm[service]` is installed."""
    code = "import sys, sfm.cli; sys.modules['zarr'] = None; sys.argv = ['sfm', 'survey', 'info', 'a.mdio']; sfm.cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "error: this command needs zarr, which is not installed; pip install 'sfm[survey]'"
