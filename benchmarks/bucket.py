"""An S3-protocol server over a folder, for measuring and for breaking: cheap to ask, and faulty on request.

It serves what lies on disk, read only, to anyone on this machine; signatures are not looked at. Whole bodies go from
file to socket inside the kernel, so that a reader under test has the processor to itself as far as possible. Faults are
drawn from a seed and the number of the request, so that a run can be repeated, and may be changed while it runs: open
a survey in peace, then read it in a storm.

    with Bucket(folder, latency=0.05) as bucket:           # folder/survey/a.mdio is s3://survey/a.mdio
        bucket.set(fail=0.1)
        ...                                                # read from bucket.endpoint_url
        print(bucket.stats())
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
import os
import random
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
from collections import Counter
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from xml.sax.saxutils import escape

from aiohttp import web

Fault = Literal["fail", "cut", "stall"]
_REGION = "us-east-1"
_PIECE = 2**20


@dataclasses.dataclass(frozen=True)
class Faults:
    """What goes wrong. Shares are of the GET requests for objects, and no request meets two."""

    latency: float = 0.0
    """Seconds before each answer begins, GET or not; requests wait side by side."""
    fail: float = 0.0
    """Share answered by 503 SlowDown."""
    cut: float = 0.0
    """Share whose connection is closed after half of the body."""
    stall: float = 0.0
    """Share whose body pauses half way."""
    stall_seconds: float = 5.0
    """Length of that pause."""
    seed: int = 0

    def draw(self, number: int) -> Fault | None:
        """What befalls GET request `number`, counted from 0 since the start or the last reset."""
        drawn = random.Random(f"{self.seed} {number}").random()
        shares: tuple[tuple[Fault, float], ...] = (("fail", self.fail), ("cut", self.cut), ("stall", self.stall))
        for fault, share in shares:
            if drawn < share:
                return fault
            drawn -= share
        return None


class BucketError(RuntimeError):
    """The server does not start."""


class Bucket:
    """Serves the folders in `root` as buckets, from a process of its own, while the context lasts.

    Args:
        tls: serve https, with a certificate that an authority made for this run has signed; see `ca_file`.
        faults: fields of :class:`Faults`.
    """

    def __init__(self, root: str | Path, tls: bool = False, **faults: Any) -> None:
        self.root, self.tls = Path(root), tls
        self.faults = Faults(**faults)
        self.endpoint_url = ""
        """Where it listens, once it does."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[str] | None = None

    @property
    def ca_file(self) -> str | None:
        """Certificate of the authority, as AWS_CA_BUNDLE and SSL_CERT_FILE take it; None without TLS."""
        return f"{self._folder.name}/ca.pem" if self._folder is not None else None

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which any S3 client finds this server and trusts it."""
        found = {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": _REGION,
            "AWS_DEFAULT_REGION": _REGION,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
        }
        if self.ca_file is not None:
            found |= {"AWS_CA_BUNDLE": self.ca_file, "SSL_CERT_FILE": self.ca_file}
        return found

    def start(self, timeout: float = 30) -> Bucket:
        """Start the server and return once it listens.

        Raises:
            BucketError: `root` is no folder, the server ends early, or it does not listen within `timeout` seconds.
        """
        command = [sys.executable, __file__, str(self.root.resolve()), json.dumps(dataclasses.asdict(self.faults))]
        if self.tls:
            self._folder = tempfile.TemporaryDirectory()
            make_certificates(Path(self._folder.name))
            command += ["--certificates", self._folder.name]
        # It ends when its standard input does: it never outlives whoever started it.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        late = threading.Timer(timeout, self._process.kill)
        late.start()
        port = self._process.stdout.readline().strip()
        late.cancel()
        if not port:
            self.stop()
            raise BucketError(f"the bucket over {self.root} did not start; its words are on standard error")
        self.endpoint_url = f"{'https' if self.tls else 'http'}://127.0.0.1:{port}"
        return self

    def stop(self) -> None:
        """End the server, if it runs."""
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Bucket:
        return self if self._process is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def set(self, **faults: Any) -> None:
        """Change some fields of :class:`Faults`, from the next request on."""
        changed = dataclasses.replace(self.faults, **faults)
        self._ask("/_control", json.dumps(dataclasses.asdict(changed)).encode())
        self.faults = changed

    def reset(self) -> None:
        """Count from zero again: what `stats` tells, and the number that faults are drawn by."""
        self._ask("/_reset", b"")

    def stats(self, prefix: str = "") -> dict[str, Any]:
        """What was served since the start or the last reset.

        Args:
            prefix: count the objects alone whose `bucket/key` begins like this.

        Returns:
            `requests` for objects (GET and HEAD), `bytes` of bodies sent, and for all objects `faults` injected, by
            name, and `peak`, the most requests that were under way at once.
        """
        found: dict[str, Any] = json.loads(self._ask(f"/_stats?prefix={urllib.parse.quote(prefix)}"))
        return found

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        context = ssl.create_default_context(cafile=self.ca_file) if self.tls else None
        with urllib.request.urlopen(self.endpoint_url + path, body, timeout=30, context=context) as answer:
            data: bytes = answer.read()
            return data


def make_certificates(folder: Path) -> None:
    """Write `ca.pem`, an authority made up for a day, and `server.pem`, a key and certificate for 127.0.0.1."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])

    def certify(name: str, key: Any, *extensions: tuple[Any, bool]) -> bytes:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(named("test authority"), named(name), key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(hours=1))
        builder = builder.not_valid_after(now + timedelta(days=1))
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")])
    # A leaf that signs itself is refused by rustls, so there are two.
    ca = certify("test authority", authority, (x509.BasicConstraints(ca=True, path_length=0), True))
    leaf = certify("localhost", own, (x509.BasicConstraints(ca=False, path_length=None), True), (names, False))
    key = own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "ca.pem").write_bytes(ca)
    (folder / "server.pem").write_bytes(key + leaf)


class _Server:
    """What runs in the process of its own."""

    def __init__(self, root: Path, faults: Faults) -> None:
        self.root, self.faults = root, faults
        self._tags: dict[tuple[Path, int, int], str] = {}
        self._reset()

    def _reset(self) -> None:
        self._number = 0
        self._peak = 0
        self._busy = 0
        self._requests: Counter[str] = Counter()  # by path
        self._bytes: Counter[str] = Counter()  # by path
        self._injected: Counter[str] = Counter()

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/_control", self.control)
        app.router.add_post("/_reset", self.reset)
        app.router.add_get("/_stats", self.stats)
        app.router.add_get("/{path:.*}", self.answer)
        return app

    async def control(self, request: web.Request) -> web.Response:
        self.faults = Faults(**await request.json())
        return web.Response()

    async def reset(self, request: web.Request) -> web.Response:
        del request
        self._reset()
        return web.Response()

    async def stats(self, request: web.Request) -> web.Response:
        prefix = request.query.get("prefix", "")
        found: dict[str, Any] = {
            name: sum(n for path, n in counts.items() if path.startswith(prefix))
            for name, counts in (("requests", self._requests), ("bytes", self._bytes))
        }
        return web.json_response({**found, "faults": dict(self._injected), "peak": self._peak})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Anything that S3 clients ask."""
        path = request.match_info["path"].strip("/")
        if ".." in path.split("/"):
            return _error(404, "NoSuchKey")
        if "/" in path and "list-type" not in request.query:
            self._busy += 1
            self._peak = max(self._peak, self._busy)
            try:
                return await self._object(request, path)
            finally:
                self._busy -= 1
        await asyncio.sleep(self.faults.latency)
        if not path:
            names = sorted(place.name for place in self.root.iterdir() if place.is_dir())
            buckets = "".join(f"<Bucket><Name>{escape(name)}</Name></Bucket>" for name in names)
            return _xml(f"<ListAllMyBucketsResult><Buckets>{buckets}</Buckets></ListAllMyBucketsResult>")
        if not (self.root / path).is_dir():
            return _error(404, "NoSuchBucket")
        return web.Response() if request.method == "HEAD" else self._list(path, request.query)

    async def _object(self, request: web.Request, path: str) -> web.StreamResponse:
        faults, fault = self.faults, None
        self._requests[path] += 1
        if request.method == "GET":
            fault = faults.draw(self._number)
            self._number += 1
        if faults.latency:
            await asyncio.sleep(faults.latency)
        if fault == "fail":
            self._injected[fault] += 1
            return _error(503, "SlowDown")
        place = self.root / path
        if not place.is_file():
            return _error(404, "NoSuchKey")
        with open(place, "rb") as file:
            state = os.fstat(file.fileno())
            size = state.st_size
            tag = f'"{await self._tag(place, state)}"'
            if request.headers.get("If-None-Match") == tag:
                return web.Response(status=304, headers={"ETag": tag})
            if request.headers.get("If-Match", tag) != tag:
                return _error(412, "PreconditionFailed")
            try:
                start, stop, _ = request.http_range.indices(size)
            except ValueError:
                start, stop = size, size
            ranged = "Range" in request.headers
            if ranged and start >= stop:
                return _error(416, "InvalidRange", {"Content-Range": f"bytes */{size}"})
            response = web.StreamResponse(
                status=206 if ranged else 200,
                headers={
                    "ETag": tag,
                    "Last-Modified": formatdate(state.st_mtime, usegmt=True),
                    "Accept-Ranges": "bytes",
                    "Content-Type": "application/octet-stream",
                    "Content-Length": str(stop - start),
                },
            )
            if ranged:
                response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            await response.prepare(request)
            if request.method == "HEAD" or start == stop:
                return response
            if fault is None:
                await self._send(request, path, file, start, stop)
                return response
            self._injected[fault] += 1
            half = start + (stop - start) // 2
            await self._send(request, path, file, start, half)
            if fault == "stall":
                await asyncio.sleep(faults.stall_seconds)
                await self._send(request, path, file, half, stop)
            elif request.transport is not None:
                request.transport.close()
            return response

    async def _send(self, request: web.Request, path: str, file: Any, start: int, stop: int) -> None:
        if request.transport is None:
            raise ConnectionResetError("the client has gone")
        if start == stop:
            return
        if request.secure:  # what is to be encrypted passes through here: asyncio's sendfile takes 16 KiB at a time
            for first in range(start, stop, _PIECE):
                piece = os.pread(file.fileno(), min(_PIECE, stop - first), first)
                await request.writer.write(piece)
                self._bytes[path] += len(piece)
            return
        sent = await asyncio.get_running_loop().sendfile(request.transport, file, start, stop - start)
        self._bytes[path] += sent  # not in one statement with the wait: others add meanwhile

    async def _tag(self, place: Path, state: os.stat_result) -> str:
        """MD5 of a file, as S3 states it for objects written in one piece; summed once."""
        key = (place, state.st_mtime_ns, state.st_size)
        if key not in self._tags:
            self._tags[key] = await asyncio.to_thread(_md5, place)
        return self._tags[key]

    def _list(self, bucket: str, query: Any) -> web.Response:
        """ListObjectsV2. Tags are left out: they would have every file read."""
        top, prefix, delimiter = self.root / bucket, query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        most = int(query.get("max-keys", 1000))
        found: dict[str, str] = {}  # key or common prefix -> XML
        # Only what lies under the last folder that the prefix names can match.
        for folder, _, names in os.walk(top / prefix.rpartition("/")[0]):
            for name in names:
                place = Path(folder, name)
                key = place.relative_to(top).as_posix()
                rest, cut, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else (key, "", "")
                if not key.startswith(prefix):
                    continue
                if cut:
                    key = prefix + rest + cut
                    found[key] = f"<CommonPrefixes><Prefix>{_quoted(key, query)}</Prefix></CommonPrefixes>"
                else:
                    state = place.stat()
                    when = datetime.fromtimestamp(state.st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
                    found[key] = (
                        f"<Contents><Key>{_quoted(key, query)}</Key><Size>{state.st_size}</Size>"
                        f"<LastModified>{when}</LastModified></Contents>"
                    )
        keys = sorted(key for key in found if key > after)
        page = keys[:most]
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(keys) > len(page) > 0 else ""
        encoding = "<EncodingType>url</EncodingType>" if "encoding-type" in query else ""
        return _xml(
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{_quoted(prefix, query)}</Prefix>{encoding}"
            f"<KeyCount>{len(page)}</KeyCount><MaxKeys>{most}</MaxKeys>"
            f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{more}"
            f"{''.join(found[key] for key in page)}</ListBucketResult>"
        )


def _md5(place: Path) -> str:
    with open(place, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _quoted(key: str, query: Any) -> str:
    return urllib.parse.quote(key) if "encoding-type" in query else escape(key)


def _xml(text: str, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'
    return web.Response(text=text, status=status, headers=headers, content_type="application/xml")


def _error(status: int, code: str, headers: dict[str, str] | None = None) -> web.Response:
    return _xml(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>", status, headers)


async def _serve(server: _Server, certificates: str | None) -> None:
    context = None
    if certificates is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(f"{certificates}/server.pem")
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    await web.SockSite(runner, listener, ssl_context=context, backlog=1024).start()
    print(listener.getsockname()[1], flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)  # nothing is ever sent: this is its end
    await ended.wait()
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder whose folders are the buckets")
    parser.add_argument("faults", nargs="?", default="{}", help="fields of Faults as a JSON object")
    parser.add_argument("--certificates", help="folder with server.pem; default: no TLS")
    options = parser.parse_args()
    if not options.root.is_dir():
        parser.error(f"{options.root} is no folder")
    asyncio.run(_serve(_Server(options.root, Faults(**json.loads(options.faults))), options.certificates))


if __name__ == "__main__":
    main()
