"""The S3-protocol server that benchmarks read from: what it serves, and that it breaks as often as it is told to."""

import hashlib
import http.client
import threading
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
import s3fs
from obstore.store import S3Store

from benchmarks.bucket import Bucket, BucketError, Faults

BODY = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("buckets")
    (root / "survey/a.mdio/amplitude/c").mkdir(parents=True)
    (root / "survey/a.mdio/amplitude/c/0").write_bytes(BODY)
    (root / "survey/a.mdio/zarr.json").write_text("{}")
    (root / "survey/empty").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def serving(root):
    with Bucket(root) as bucket:
        yield bucket


@pytest.fixture
def bucket(serving):
    serving.set(**vars(Faults()))
    serving.reset()
    return serving


def ask(bucket, path, method="GET", **headers):
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(bucket.endpoint_url).netloc, timeout=20)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def rust(bucket):
    trust = {"root_certificate": Path(bucket.ca_file).read_bytes()} if bucket.ca_file else {"allow_http": True}
    return S3Store(
        "survey",
        endpoint=bucket.endpoint_url,
        region="us-east-1",
        skip_signature=True,
        client_options={**trust, "timeout": "20s"},
        retry_config={"max_retries": 0},
    )


def python(bucket):
    return s3fs.S3FileSystem(anon=True, endpoint_url=bucket.endpoint_url, skip_instance_cache=True)


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-99", 0, 100),
        ("bytes=100-100", 100, 101),
        ("bytes=10000-", 10000, len(BODY)),
        ("bytes=10000-999999", 10000, len(BODY)),
        ("bytes=-5", len(BODY) - 5, len(BODY)),
        ("bytes=-999999", 0, len(BODY)),
    ],
)
def test_ranges(bucket, asked, start, stop):
    answer, body = ask(bucket, "/survey/a.mdio/amplitude/c/0", Range=asked)
    assert answer.status == 206
    assert body == BODY[start:stop]
    assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(BODY)}"


@pytest.mark.parametrize("asked", [f"bytes={len(BODY)}-", "bytes=9-3"])
def test_a_range_beyond_the_end_is_refused(bucket, asked):
    answer, body = ask(bucket, "/survey/a.mdio/amplitude/c/0", Range=asked)
    assert answer.status == 416
    assert b"InvalidRange" in body
    assert answer.headers["Content-Range"] == f"bytes */{len(BODY)}"


def test_objects_whole_by_head_absent_and_empty(bucket):
    answer, body = ask(bucket, "/survey/a.mdio/amplitude/c/0")
    assert (answer.status, body) == (200, BODY)
    assert answer.headers["ETag"] == f'"{hashlib.md5(BODY).hexdigest()}"'
    answer, body = ask(bucket, "/survey/a.mdio/amplitude/c/0", "HEAD")
    assert (answer.status, body, answer.headers["Content-Length"]) == (200, b"", str(len(BODY)))
    assert ask(bucket, "/survey/empty")[0].status == 200
    for absent in ("/survey/none", "/survey/a.mdio", "/survey/../survey/empty", "/other/key"):
        answer, body = ask(bucket, absent)
        assert answer.status == 404
        assert b"<Code>NoSuchKey</Code>" in body
    assert ask(bucket, "/survey/empty", If_None_Match='"d41d8cd98f00b204e9800998ecf8427e"')[0].status == 304


def test_listing_by_obstore_and_s3fs(bucket):
    store, files = rust(bucket), python(bucket)
    names = ["a.mdio/amplitude/c/0", "a.mdio/zarr.json"]
    assert [found["path"] for page in obstore.list(store, "a.mdio") for found in page] == names
    assert [len(page) for page in obstore.list(store, chunk_size=1)] == [1, 1, 1]
    assert obstore.list_with_delimiter(store, "a.mdio")["common_prefixes"] == ["a.mdio/amplitude"]
    assert sorted(files.find("survey/a.mdio")) == [f"survey/{name}" for name in names]
    assert files.exists("survey/a.mdio/amplitude")
    assert not files.exists("survey/a.mdio/none")
    assert files.ls("survey") == ["survey/a.mdio", "survey/empty"]


def test_what_it_counts(bucket):
    ask(bucket, "/survey/a.mdio/amplitude/c/0")
    ask(bucket, "/survey/a.mdio/amplitude/c/0", Range="bytes=0-9")
    ask(bucket, "/survey/a.mdio/zarr.json")
    assert bucket.stats() == {"requests": 3, "bytes": len(BODY) + 12, "faults": {}, "peak": 1}
    assert bucket.stats("survey/a.mdio/amplitude")["bytes"] == len(BODY) + 10
    bucket.reset()
    assert bucket.stats()["requests"] == 0


def test_what_it_counts_of_one_object_asked_for_by_many_at_once(bucket, root):
    size = 2**23
    with open(root / "survey/large", "wb") as file:
        file.truncate(size)
    store = rust(bucket)
    with ThreadPoolExecutor(8) as threads:
        assert {len(data) for data in threads.map(lambda _: obstore.get(store, "large").bytes(), range(16))} == {size}
    deadline = time.monotonic() + 10
    while bucket.stats()["bytes"] < 16 * size and time.monotonic() < deadline:
        time.sleep(0.01)
    (root / "survey/large").unlink()
    assert bucket.stats()["bytes"] == 16 * size


def outcome(bucket):
    try:
        answer, body = ask(bucket, "/survey/a.mdio/amplitude/c/0")
    except http.client.IncompleteRead as error:
        return "cut" if error.partial == BODY[: len(BODY) // 2] else "something else"
    assert body == BODY or answer.status == 503
    return "fail" if answer.status == 503 else None


def test_faults_come_at_their_share_and_the_same_ones_again(bucket):
    bucket.set(fail=0.2, cut=0.1, stall=0.1, stall_seconds=0.001, seed=3)
    first = [outcome(bucket) for _ in range(400)]
    faults = bucket.stats()["faults"]
    assert faults["fail"] == first.count("fail") == pytest.approx(80, abs=24)  # three standard deviations
    assert faults["cut"] == first.count("cut") == pytest.approx(40, abs=18)
    assert faults["stall"] == pytest.approx(40, abs=18)
    bucket.reset()
    assert [outcome(bucket) for _ in range(50)] == first[:50]
    bucket.set(fail=0, cut=0, stall=0)
    assert [outcome(bucket) for _ in range(50)] == [None] * 50


def test_a_client_sees_the_faults(bucket):
    store = rust(bucket)
    bucket.set(fail=1)
    with pytest.raises(Exception, match="503"):
        obstore.get(store, "a.mdio/amplitude/c/0")
    bucket.set(fail=0, cut=1)
    with pytest.raises(Exception, match=r"(?i)body|decod|incomplete|closed"):
        obstore.get(store, "a.mdio/amplitude/c/0").bytes()
    bucket.set(cut=0)
    assert obstore.get(store, "a.mdio/amplitude/c/0").bytes() == BODY


def test_a_stalled_body_ends_after_its_pause(bucket):
    bucket.set(stall=1, stall_seconds=0.3)
    began = time.monotonic()
    assert ask(bucket, "/survey/a.mdio/amplitude/c/0")[1] == BODY
    assert time.monotonic() - began >= 0.3


def test_latency_is_waited_for_side_by_side(bucket):
    bucket.set(latency=0.3)
    threads = [threading.Thread(target=ask, args=(bucket, "/survey/a.mdio/zarr.json")) for _ in range(20)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.3 <= time.monotonic() - began < 3  # one after the other: 6 s
    assert bucket.stats()["peak"] > 10


def test_tls_is_verified_by_obstore_and_s3fs(root, monkeypatch):
    with Bucket(root, tls=True) as bucket:
        assert obstore.get(rust(bucket), "a.mdio/amplitude/c/0").bytes() == BODY
        stranger = {"region": "us-east-1", "skip_signature": True, "retry_config": {"max_retries": 0}}
        with pytest.raises(Exception, match=r"(?i)certificate|error sending request"):
            obstore.get(S3Store("survey", endpoint=bucket.endpoint_url, **stranger), "a.mdio/amplitude/c/0")
        files = python(bucket)
        files.retries = 1
        with pytest.raises(Exception, match=r"(?i)certificate|SSL"):
            files.cat_file("survey/a.mdio/amplitude/c/0")
        monkeypatch.setenv("AWS_CA_BUNDLE", bucket.ca_file)
        files = python(bucket)
        assert files.cat_file("survey/a.mdio/amplitude/c/0", start=5, end=9) == BODY[5:9]
        assert files.exists("survey/a.mdio")
        assert bucket.stats()["bytes"] == len(BODY) + 4


def test_it_ends_with_its_context_and_says_when_it_cannot_start(root):
    with Bucket(root) as bucket:
        assert urllib.request.urlopen(bucket.endpoint_url).status == 200
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(bucket.endpoint_url)
    with pytest.raises(TypeError, match="speed"):
        Bucket(root, speed=1)
    with pytest.raises(BucketError, match="did not start"):
        Bucket(root / "none").start()
