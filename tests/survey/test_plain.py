"""GETs over plain HTTP: the bytes that other clients give, connections that are used again, and whatever servers do."""

from __future__ import annotations

import gc
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from obstore.exceptions import PermissionDeniedError

from benchmarks.bucket import Bucket
from sfm.spec import Storage
from sfm.survey import plain
from sfm.survey.clients import status
from sfm.survey.devstore import DevStore
from sfm.survey.failures import is_passing, is_throttling
from sfm.survey.objects import Objects, objects_at
from sfm.survey.plain import BrokenBodyError, PlainServer, direct, plain_server
from sfm.survey.store import explain

DATA = bytes(range(256)) * 40
RANGES = [(0, None), (0, 10), (7, 300), (100, None), (-16, None), (len(DATA) - 5, len(DATA) + 50)]
Script = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Serves DATA at every path, unless the server's script does something else."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.server.seen.append((self.client_address[1], self.path, dict(self.headers)))
        self.server.script(self)

    def part(self) -> tuple[int, int]:
        """What the Range header asks for."""
        asked = self.headers.get("Range")
        if asked is None:
            return 0, len(DATA)
        first, last = asked.removeprefix("bytes=").split("-")
        if not first:
            return len(DATA) - int(last), len(DATA)
        return int(first), min(int(last) + 1, len(DATA)) if last else len(DATA)

    def head(self, code: int, size: int | None, **headers: str) -> None:
        self.send_response(code)
        if size is not None:
            self.send_header("Content-Length", str(size))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def serve(self, **headers: str) -> None:
        start, stop = self.part()
        code = 206 if "Range" in self.headers else 200
        stated = {"Content_Range": f"bytes {start}-{stop - 1}/{len(DATA)}", "Last_Modified": self.date_time_string()}
        self.head(code, stop - start, **(stated | headers))
        self.wfile.write(DATA[start:stop])

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    script: Script = staticmethod(Handler.serve)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[int, str, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def objects(self) -> Objects:
        return objects_at("s3://bucket/s.mdio", Storage(endpoint_url=self.url, region="us-east-1", anonymous=True))


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


def asks(server: Server) -> PlainServer:
    return PlainServer("127.0.0.1", server.server_address[1])


@pytest.mark.parametrize("wanted", RANGES)
def test_the_bytes_that_were_asked_for(server: Server, wanted: tuple[int, int | None]) -> None:
    start, stop = wanted
    found = asks(server).get("/a", start, stop)
    assert found.body == DATA[start:stop]
    assert not found.body.readonly  # type: ignore[union-attr]


def test_one_connection_serves_many_requests_and_a_closed_one_is_replaced(server: Server) -> None:
    client = asks(server)
    for start in range(5):
        assert client.get("/a", start, 20).body == DATA[start:20]
    assert len({port for port, *_ in server.seen}) == 1

    def last(handler: Handler) -> None:
        handler.serve()
        handler.close_connection = True  # without saying so

    server.script = last
    client.get("/a", 0, 5)
    poll_until(lambda: plain._is_closed(client._idle[-1][1]))
    server.script = Handler.serve
    assert client.get("/a", 0, 5).body == DATA[:5]
    assert len({port for port, *_ in server.seen}) == 2


def test_connections_that_idled_too_long_are_not_used_again(server: Server) -> None:
    client = asks(server)
    held = [client._connect() for _ in range(4)]
    old, fresh = time.monotonic() - plain._IDLE_SECONDS - 1, time.monotonic()
    client._idle = [(old, held[0]), (old, held[1]), (fresh, held[2]), (old, held[3])]
    client.get("/a")  # by the third
    assert [connection for _, connection in client._idle] == held[2:3]
    assert [connection.sock is None for connection in held] == [True, True, False, True]


def test_one_dead_connection_is_a_sign_of_others(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a router on the way has forgotten them: nothing says so."""
    monkeypatch.setattr(plain, "READ_SECONDS", 0.2)
    client, released = asks(server), Event()
    held = [client._connect() for _ in range(3)]
    client._idle = [(time.monotonic(), connection) for connection in held]
    server.script = lambda _: released.wait(20) and None
    with pytest.raises(TimeoutError):
        client.get("/a")
    assert not client._idle
    server.script = Handler.serve
    assert client.get("/a", 0, 5).body == DATA[:5]
    released.set()


@pytest.mark.parametrize("code", [404, 503])
@pytest.mark.parametrize("chunked", [False, True])
def test_refusals_leave_the_connection_usable(server: Server, code: int, chunked: bool) -> None:
    def refuse(handler: Handler) -> None:
        if chunked:
            handler.head(code, None, Transfer_Encoding="chunked")
            handler.wfile.write(b"5\r\nwords\r\n0\r\n\r\n")
        else:
            handler.head(code, 5)
            handler.wfile.write(b"words")

    server.script = refuse
    client = asks(server)
    for _ in range(5):
        assert client.get("/a", 0, 9) == (code, None)
    assert len({port for port, *_ in server.seen}) == 1


def test_servers_are_shared_and_their_connections_end_with_them(server: Server) -> None:
    port = server.server_address[1]
    one, other = plain_server("127.0.0.1", port), plain_server("127.0.0.1", port)
    assert one is other
    one.get("/a")
    connection, gone = one._idle[0][1], weakref.ref(one)
    del one, other
    gc.collect()
    assert gone() is None
    assert connection.sock is None


@pytest.mark.parametrize("size", [100, 0])
def test_a_body_that_ends_early(server: Server, size: int) -> None:
    def cut(handler: Handler) -> None:
        handler.head(200, len(DATA))
        handler.wfile.write(DATA[:size])
        handler.close_connection = True

    server.script = cut
    with pytest.raises(BrokenBodyError, match=f"the body ended after {size} of {len(DATA)} bytes") as caught:
        asks(server).get("/a")
    assert is_passing(caught.value)


def test_a_body_that_stalls_or_drips_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(handler: Handler) -> None:
        handler.head(200, len(DATA))
        try:
            for byte in DATA:
                handler.wfile.write(bytes([byte]))
                time.sleep(0.02)  # a slow server: there is no other way to be one
        except OSError:
            handler.close_connection = True

    server.script = drip
    monkeypatch.setattr(plain, "REQUEST_SECONDS", 0.3)
    with pytest.raises(BrokenBodyError, match=r"timed out: \d+ of \d+ bytes came") as caught:
        asks(server).get("/a")
    assert "sent nothing for" in str(explain(caught.value, "s3://b/k", Storage(endpoint_url=server.url)))

    def stall(handler: Handler) -> None:
        handler.head(200, len(DATA))
        handler.rfile.read(1)  # until the client goes

    server.script = stall
    monkeypatch.setattr(plain, "READ_SECONDS", 0.2)
    with pytest.raises(BrokenBodyError, match="timed out: nothing came"):
        asks(server).get("/a")


def test_no_server_there() -> None:
    with socket.socket() as bound:  # and nobody listens
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError) as caught:
            PlainServer(*bound.getsockname()).get("/a")
    assert "cannot connect to" in str(explain(caught.value, "s3://b/k", Storage(endpoint_url="http://127.0.0.1:9")))


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_what_passes_is_told_without_asking_twice(server: Server, code: int) -> None:
    server.script = lambda handler: handler.head(code, 0)
    with pytest.raises(OSError, match=str(code)) as caught:
        server.objects().get("a", 0, 5)
    assert (status(caught.value), is_passing(caught.value)) == (code, True)
    assert is_throttling(caught.value) == (code in (429, 503))
    assert len(server.seen) == 1


def test_absent_objects(server: Server) -> None:
    server.script = lambda handler: handler.head(404, 0)
    assert server.objects().get("a", 0, 5) is None
    assert len(server.seen) == 1


def test_refusals_get_the_words_of_the_general_client(server: Server) -> None:
    server.script = lambda handler: handler.head(403, 0)
    with pytest.raises((PermissionError, PermissionDeniedError)):
        server.objects().get("a", 0, 5)


def test_a_redirect_is_followed_and_remembered(server: Server) -> None:
    def elsewhere(handler: Handler) -> None:
        if handler.path.startswith("/bucket"):
            handler.head(307, 0, Location=f"{server.url}/there")
        else:
            handler.serve()

    server.script = elsewhere
    objects = server.objects()
    assert objects.get("a", 3, 9) == DATA[3:9]
    before = len(server.seen)
    assert objects.get("a", 4, 8) == DATA[4:8]
    assert [path for _, path, _ in server.seen[before:]] == ["/bucket/s.mdio/a", "/there"]  # not first by plain HTTP


def test_a_server_that_knows_no_signed_urls_gets_signed_requests(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strict(handler: Handler) -> None:
        if "Authorization" in handler.headers:
            handler.serve()
        else:
            handler.head(403, 0)

    server.script = strict
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    objects = objects_at("s3://bucket/s.mdio", Storage(endpoint_url=server.url, region="us-east-1"))
    for start in range(3):
        assert objects.get("a", start, 9) == DATA[start:9]
    assert ["X-Amz-Signature" in path for _, path, _ in server.seen] == [True, False, False, False]


def whole(handler: Handler) -> None:
    handler.head(200, len(DATA), Last_Modified=handler.date_time_string())
    handler.wfile.write(DATA)


def test_a_server_that_knows_no_ranges_is_left_to_the_general_client(server: Server) -> None:
    server.script = whole
    assert asks(server).get("/a", 0, len(DATA)).body == DATA  # as it happens, that is it
    objects = server.objects()
    before = len(server.seen)
    assert objects.get("a", 5, 50) == DATA[5:50]
    first = len(server.seen) - before
    assert objects.get("a", 6, 60) == DATA[6:60]
    assert len(server.seen) - before - first < first


def test_chunked_bodies_are_left_to_the_general_client(server: Server) -> None:
    def chunked(handler: Handler) -> None:
        start, stop = handler.part()
        stated = {"Content_Range": f"bytes {start}-{stop - 1}/{len(DATA)}", "Last_Modified": handler.date_time_string()}
        # A length beside it, which must not count.
        handler.head(206, stop - start, Transfer_Encoding="chunked", **stated)
        handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (stop - start, DATA[start:stop]))

    server.script = chunked
    assert asks(server).get("/a", 5, 50).body is None


PART = {"Content_Range": f"bytes 5-49/{len(DATA)}", "Content_Length": "45"}


@pytest.mark.parametrize(
    ("status", "headers", "taken"),
    [
        (206, {}, True),
        (200, {}, True),  # as rclone says
        (206, {"Content_Range": "bytes 5-49/*"}, True),
        (206, {"Content_Range": "bytes 5-49/50"}, True),
        (206, {"Content_Encoding": "identity"}, True),
        (206, {"Content_Encoding": "gzip"}, False),
        (206, {"Content_Range": f"bytes 9-53/{len(DATA)}"}, False),
        (206, {"Content_Range": f"bytes 5-19/{len(DATA)}", "Content_Length": "15"}, False),
        (206, {"Content_Range": "bytes 5-19/20", "Content_Length": "15"}, True),  # the object ends there
        (206, {"Content_Range": "bytes 5-49/*", "Content_Length": "44"}, False),
        (206, {"Content_Range": "junk"}, False),
        (206, {"Content_Length": "junk"}, False),
        (206, {"Content_Length": "\u00b2"}, False),
        (206, {"Content_Length": "9" * 5000}, False),
        (203, {}, False),
    ],
)
def test_bytes_that_are_not_those_asked_for_are_not_taken(
    server: Server, status: int, headers: dict[str, str], taken: bool
) -> None:
    stated = PART | headers

    def other(handler: Handler) -> None:
        handler.head(status, None, **stated)
        handler.wfile.write(DATA[5:50])

    server.script = other
    client = asks(server)
    found = client.get("/a", 5, 50).body
    assert (found is not None) == taken
    if found is not None:
        assert found == DATA[5 : 5 + len(found)]
    server.script = Handler.serve
    assert client.get("/a", 5, 50).body == DATA[5:50]


@pytest.mark.parametrize(
    ("stated", "taken"), [(f"{len(DATA) - 16}-{len(DATA) - 1}/{len(DATA)}", True), ("0-15/*", False)]
)
def test_a_suffix_must_be_the_end(server: Server, stated: str, taken: bool) -> None:
    def other(handler: Handler) -> None:
        handler.head(206, 16, Content_Range=f"bytes {stated}")
        handler.wfile.write(DATA[-16:])

    server.script = other
    assert (asks(server).get("/a", -16).body is not None) == taken


def test_a_longer_body_than_asked_for_is_not_received(server: Server) -> None:
    def generous(handler: Handler) -> None:
        handler.head(206, 10**15, Content_Range=f"bytes 5-{10**15}/*")

    server.script = generous
    assert asks(server).get("/a", 5, 50).body is None


def test_what_is_asked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert direct("http://minio:9000/base") is not None
    for url in ("https://minio", "", "somewhere", "http://me:secret@minio", "http://minio/?a=b", "http://minio:99999"):
        assert direct(url) is None, url
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    assert direct("http://minio:9000") is None
    monkeypatch.setenv("NO_PROXY", "minio,127.0.0.1")
    assert direct("http://minio:9000") is not None
    monkeypatch.delenv("HTTP_PROXY")
    monkeypatch.setenv("ALL_PROXY", "http://proxy:3128")
    assert direct("http://elsewhere") is None


NAMES = ["a", "a b", "c+d%20e", "ü/~x", "(p)='q'&r"]


def test_every_name_over_a_store_that_checks_signatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        (tmp_path / "lab/my surveys" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lab/my surveys" / name).write_bytes(DATA + name.encode())
    with DevStore(tmp_path) as store:
        for variable, value in store.environment.items():
            monkeypatch.setenv(variable, value)
        objects: Any = objects_at("s3://lab/my surveys", Storage())
        for name in NAMES:
            assert objects.get(name, 10, 900) == DATA[10:900], name
            assert objects.get(name) == DATA + name.encode(), name
        assert objects.get("absent", 0, 10) is None
        assert objects._suffices
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises((PermissionError, PermissionDeniedError)):
            objects_at("s3://lab/my surveys", Storage()).get("a", 0, 10)


@pytest.mark.parametrize("folder", ["s", "my süd+%3d"])
def test_every_name_unsigned(tmp_path: Path, folder: str) -> None:
    for name in NAMES:
        (tmp_path / "lab" / folder / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lab" / folder / name).write_bytes(DATA)
    with Bucket(tmp_path) as bucket:
        public = Storage(endpoint_url=bucket.endpoint_url, region="us-east-1", anonymous=True)
        web = f"{bucket.endpoint_url}/lab/{folder.replace('%', '%25')}"
        found: list[Any] = [objects_at(f"s3://lab/{folder}", public), objects_at(web, Storage())]
        for objects in found:
            for name in NAMES:
                assert objects.get(name, 10, 900) == DATA[10:900], name
            assert objects._suffices


@pytest.mark.parametrize("keys", [False, True])
def test_the_environment_may_forbid_signatures(server: Server, monkeypatch: pytest.MonkeyPatch, keys: bool) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key") if keys else monkeypatch.delenv(name, raising=False)
    objects = objects_at("s3://bucket/s.mdio", Storage(endpoint_url=server.url, region="us-east-1"))
    assert objects.get("a", 3, 9) == DATA[3:9]
    assert [path for _, path, _ in server.seen] == ["/bucket/s.mdio/a"]


def test_without_keys_it_is_the_general_client_that_says_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/none")
    storage = Storage(endpoint_url=server.url, region="us-east-1")
    with pytest.raises(Exception, match="no credentials") as caught:
        objects_at("s3://bucket/s.mdio", storage).get("a", 3, 9)
    assert "no credentials for" in str(explain(caught.value, "s3://bucket/s.mdio", storage))
    assert not server.seen


def poll_until(true: Callable[[], bool]) -> None:
    """Wait for what another thread is about to bring about."""
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
