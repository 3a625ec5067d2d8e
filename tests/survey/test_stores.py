"""Surveys in stores that are not S3's: the same values, and sentences where there is nothing to read."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bucket import Bucket
from sfm.spec import Storage
from sfm.survey.clients import SurveyError
from sfm.survey.mdio import open_survey
from sfm.survey.pacing import Backoff
from sfm.survey.reader import WindowReader
from sfm.survey.transfers import Transfers
from tests.survey.conftest import write_v1

VALUES = np.random.default_rng(0).standard_normal((30, 20, 40)).astype("f4")
# Azurite's only account, the same in every installation.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stores")
    write_v1(root / "surveys/a b/s.mdio", VALUES, chunks=(8, 8, 8))
    write_v1(root / "surveys/a b/shards.mdio", VALUES, chunks=(8, 5, 8), shards=(16, 10, 40))
    return root


@pytest.fixture(scope="module")
def google(written: Path) -> Iterator[Bucket]:
    """Google's XML interface gives objects and lists of them as S3 does."""
    with Bucket(written) as running:
        yield running


@pytest.fixture(scope="module")
def azure(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an account of Azurite's, which has to be installed (npm install -g azurite)."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not on the PATH: npm install -g azurite")
    import obstore
    from obstore.store import AzureStore

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("azurite")
    said = folder / "said"
    arguments = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--skipApiVersionCheck"]
    with said.open("w") as out, subprocess.Popen([program, *arguments, "--silent"], stdout=out, stderr=out) as server:
        try:
            deadline = time.monotonic() + 60
            while not _listens(port):
                assert server.poll() is None, said.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            url = f"http://127.0.0.1:{port}/{ACCOUNT}"
            store = AzureStore(
                "surveys", endpoint=url, account_name=ACCOUNT, account_key=KEY, client_options={"allow_http": True}
            )
            _make_container(url)
            for path in sorted((written / "surveys").rglob("*")):
                if path.is_file():
                    obstore.put(store, str(path.relative_to(written / "surveys")), path.read_bytes())
            yield url
        finally:
            server.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _make_container(account: str) -> None:
    """Make `surveys`, signed as Azure's "Authorize with Shared Key" says; obstore makes none."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())]
    text = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/surveys", "restype:container"])
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(f"{account}/surveys?restype=container", method="PUT", headers=headers)
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 201


def reads_everything(url: str, storage: Storage, backoff: Backoff | None = None) -> None:
    with contextlib.closing(Transfers(backoff=backoff)) as transfers:
        for name in ("s.mdio", "shards.mdio"):
            survey = open_survey(f"{url}/a b/{name}", storage)
            reader = WindowReader(survey, None, transfers, keep=False)
            np.testing.assert_array_equal(reader.read((0, 0, 0), VALUES.shape), VALUES)
            np.testing.assert_array_equal(reader.read((7, 3, 9), (10, 9, 20)), VALUES[7:17, 3:12, 9:29])


def test_google(google: Bucket) -> None:
    storage = Storage(endpoint_url=google.endpoint_url, anonymous=True)
    reads_everything("gs://surveys", storage)
    google.set(fail=0.1, cut=0.1)
    try:
        reads_everything("gs://surveys", storage, Backoff(first=0.01, attempts=15))
    finally:
        google.set(fail=0, cut=0)
    with pytest.raises(SurveyError, match=r"no survey at gs://surveys/none.mdio; check the name"):
        open_survey("gs://surveys/none.mdio", storage)
    with pytest.raises(SurveyError, match=r"not an MDIO store: it holds no Zarr metadata"):
        open_survey("gs://surveys/a b", storage)
    with pytest.raises(SurveyError, match=r"cannot connect to http://127.0.0.1:1;.* storage.endpoint_url names it"):
        open_survey("gs://surveys/none.mdio", Storage(endpoint_url="http://127.0.0.1:1", anonymous=True))


def test_azure_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(SurveyError, match=r"az://surveys/s.mdio: of which account\? Set AZURE_STORAGE_ACCOUNT_NAME"):
        open_survey("az://surveys/s.mdio")


def test_azure(azure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    storage = Storage(endpoint_url=azure)
    reads_everything("az://surveys", storage)
    with pytest.raises(SurveyError, match=r"no survey at az://surveys/none.mdio; check the name"):
        open_survey("az://surveys/none.mdio", storage)
    with pytest.raises(SurveyError, match=r"no survey at az://other/none.mdio: there is no such bucket"):
        open_survey("az://other/none.mdio", storage)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(bytes(64)).decode())
    with pytest.raises(SurveyError, match=r"refuses permission to read it .*AZURE_STORAGE_ACCOUNT_NAME and its key"):
        open_survey("az://surveys/a b/s.mdio", storage)
