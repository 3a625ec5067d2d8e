"""GETs over plain HTTP, received straight into the memory that a body stays in.

Clients put a body together from pieces, and so copy all that is read once more. Here the kernel's copy is the only one,
which spares about a sixth of the processor time of a window (`benchmarks/LOG.md`). Over TLS there is nothing to gain:
there the pieces are records of 16 KiB, whoever receives them.
"""

from __future__ import annotations

import http.client
import select
import threading
import time
import urllib.request
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit
from weakref import WeakValueDictionary

import numpy as np

from sfm.survey.clients import CONNECT_SECONDS, READ_SECONDS, REQUEST_SECONDS

_IDLE_SECONDS = 60  # servers keep an unused connection about as long


class BrokenBodyError(OSError):
    """A body ended early, or came too slowly."""


class Answer(NamedTuple):
    """What came for a GET."""

    status: int
    body: memoryview | None
    """The bytes that were asked for; None where something else came."""


def direct(url: str) -> SplitResult | None:
    """The parts of a server's URL; None unless plain HTTP reaches it, without keys in the URL and without a proxy."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.query or parts.username is not None:
        return None
    proxies = urllib.request.getproxies()
    proxied = ("http" in proxies or "all" in proxies) and not urllib.request.proxy_bypass(parts.netloc)
    return None if proxied else parts


class PlainServer:
    """One server, over connections that are kept. Threads may share it."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []  # since when; the one used last is last
        self._lock = threading.Lock()

    def get(self, target: str, start: int = 0, stop: int | None = None) -> Answer:
        """Ask for bytes `start` to `stop` of an object; for the last ones where `start` is negative.

        Args:
            target: its path, and query if any, percent-encoded.

        Raises:
            BrokenBodyError: the body was cut short, or came too slowly.
            OSError: there is no connection, or it broke before the answer.
            http.client.HTTPException: the server does not speak HTTP.
        """
        headers = {"User-Agent": "sfm"}
        if start or stop is not None:
            headers["Range"] = f"bytes={start}" + ("" if start < 0 else f"-{'' if stop is None else stop - 1}")
        connection = self._connect()
        try:
            connection.request("GET", target, headers=headers)
            came = connection.getresponse()
            size = _size(came, start, stop)
            body = None if size is None else _receive(came, size)
            came.close()
        except BaseException:
            connection.close()
            raise
        if body is None or came.will_close:
            connection.close()
        else:
            self._keep(connection)
        return Answer(came.status, body)

    def _connect(self) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                if not self._idle:
                    break
                _, connection = self._idle.pop()
            if not _is_stale(connection):
                return connection
            connection.close()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=CONNECT_SECONDS)
        connection.connect()
        connection.sock.settimeout(READ_SECONDS)
        return connection

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        now = time.monotonic()
        with self._lock:
            self._idle.append((now, connection))
            while self._idle[0][0] < now - _IDLE_SECONDS:
                self._idle.pop(0)[1].close()

    def __del__(self) -> None:
        for _, connection in self._idle:
            connection.close()


_servers: WeakValueDictionary[tuple[str, int], PlainServer] = WeakValueDictionary()
_making = threading.Lock()


def plain_server(host: str, port: int) -> PlainServer:
    """The server there, shared by all who use it."""
    with _making:
        found = _servers.get((host, port))
        if found is None:
            found = _servers[host, port] = PlainServer(host, port)
        return found


def _size(came: http.client.HTTPResponse, start: int, stop: int | None) -> int | None:
    """Bytes of a body that is what was asked for; None of another."""
    stated = came.getheader("Content-Length")
    if stated is None or not stated.isdigit() or came.getheader("Content-Encoding", "identity") != "identity":
        return None
    size, ranged = int(stated), start != 0 or stop is not None
    if came.status != (206 if ranged else 200) or (stop is not None and size > stop - start):
        return None
    if ranged and start >= 0 and not came.getheader("Content-Range", "").startswith(f"bytes {start}-"):
        return None
    return size


def _receive(came: http.client.HTTPResponse, size: int) -> memoryview:
    deadline = time.monotonic() + REQUEST_SECONDS
    body, at = np.empty(size, np.uint8).data, 0
    while at < size:
        try:
            got = came.fp.readinto1(body[at:])
        except TimeoutError:
            raise BrokenBodyError(f"timed out: nothing came for {READ_SECONDS} seconds") from None
        if not got:
            raise BrokenBodyError(f"the body ended after {at} of {size} bytes")
        at += got
        if at < size and time.monotonic() > deadline:
            raise BrokenBodyError(f"timed out: {at} of {size} bytes came within {REQUEST_SECONDS} seconds")
    return body


def _is_stale(connection: http.client.HTTPConnection) -> bool:
    """Whether something happened on a connection on which nothing is awaited: the server has closed it."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))
