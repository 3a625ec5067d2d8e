"""GETs over plain HTTP, received straight into the memory that a body stays in.

Clients put a body together from pieces, and so copy all that is read once more. Here the kernel's copy is the only one,
which spares about a sixth of the processor time of a window (`benchmarks/LOG.md`). Over TLS there is nothing to gain:
there the pieces are records of 16 KiB, whoever receives them.
"""

from __future__ import annotations

import http.client
import re
import select
import threading
import time
import urllib.request
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote, urlsplit
from weakref import WeakValueDictionary

import numpy as np

from sfm.survey.clients import CONNECT_SECONDS, READ_SECONDS, REQUEST_SECONDS

_IDLE_SECONDS = 60
"""A connection unused for longer may be dead without a sign of it: routers and firewalls forget it from 5 minutes on."""
_SMALL = 2**16  # bytes of a body that nobody wants, but that keep its connection usable once they are read
_LONGEST = 12  # digits of a length that is believed


class BrokenBodyError(OSError):
    """A body ended early, or came too slowly."""


class Answer(NamedTuple):
    """What came for a GET."""

    status: int
    body: memoryview | None
    """The bytes that were asked for, which the caller may change; None where anything else came."""


class Place(NamedTuple):
    """Where a URL leads."""

    host: str
    port: int
    path: str
    """Percent-encoded, without a slash at its end."""


def direct(url: str) -> Place | None:
    """Where a URL leads; None unless plain HTTP gets there, without keys in the URL and without a proxy."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.query or parts.username is not None:
        return None
    try:
        port = 80 if parts.port is None else parts.port
    except ValueError:  # no port at all: it is for others to say so
        return None
    proxies = urllib.request.getproxies()
    if ("http" in proxies or "all" in proxies) and not urllib.request.proxy_bypass(parts.netloc):
        return None
    return Place(parts.hostname, port, quote(parts.path, safe="/%:@!$&'()*+,;=~").rstrip("/"))


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
        deadline = time.monotonic() + REQUEST_SECONDS
        connection = self._connect()
        try:
            try:
                connection.request("GET", target, headers=headers)
                came = connection.getresponse()
            except OSError:  # and those that idled beside it are no better
                self._close_idle()
                raise
            size = _size(came, start, stop)
            body = None if size is None else _receive(came, size, deadline)
            usable = not came.will_close and (body is not None or _drain(came, deadline))
            came.close()
        except BaseException:
            connection.close()
            raise
        if usable:
            self._keep(connection)
        else:
            connection.close()
        return Answer(came.status, body)

    def _connect(self) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                if not self._idle:
                    break
                since, connection = self._idle.pop()
            if since > time.monotonic() - _IDLE_SECONDS and not _is_closed(connection):
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
            fresh = next(n for n, (since, _) in enumerate(self._idle) if since > now - _IDLE_SECONDS)
            old, self._idle = self._idle[:fresh], self._idle[fresh:]
        _close(old)

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        _close(idle)

    def __del__(self) -> None:
        _close(self._idle)


_servers: WeakValueDictionary[tuple[str, int], PlainServer] = WeakValueDictionary()
_sharing = threading.Lock()


def plain_server(host: str, port: int) -> PlainServer:
    """The server there, shared by all who use it."""
    with _sharing:
        found = _servers.get((host, port))
        if found is None:
            found = _servers[host, port] = PlainServer(host, port)
        return found


def _size(came: http.client.HTTPResponse, start: int, stop: int | None) -> int | None:
    """Bytes of a body that is what was asked for, all of it or up to the object's end; None of any other."""
    stated = came.getheader("Content-Length", "")
    if not re.fullmatch(rf"[0-9]{{1,{_LONGEST}}}", stated) or "Transfer-Encoding" in came.headers:
        return None
    if came.getheader("Content-Encoding", "identity") != "identity":
        return None
    size, part = int(stated), came.getheader("Content-Range")
    if came.status == 200 and part is None:  # all of it, which may be what was asked for
        return size if start == 0 and (stop is None or size <= stop) else None
    found = re.fullmatch(r"bytes ([0-9]+)-([0-9]+)/([0-9]+|\*)", part or "")
    if came.status not in (200, 206) or found is None:  # rclone says 200 of parts, too
        return None
    first, end, total = int(found[1]), int(found[2]) + 1, None if found[3] == "*" else int(found[3])
    if total is None:
        return size if (first, end) == (start, stop) and size == end - first else None
    wanted = max(total + start, 0) if start < 0 else start
    return size if (first, end) == (wanted, min(stop or total, total)) and size == end - first else None


def _receive(came: http.client.HTTPResponse, size: int, deadline: float) -> memoryview:
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


def _drain(came: http.client.HTTPResponse, deadline: float) -> bool:
    """Read the few words of a refusal to their end; whether they were such."""
    left, ended = _SMALL, came.length == 0 or came.isclosed()
    try:
        while came.status >= 300 and not ended and left > 0 and time.monotonic() < deadline:
            left -= len(came.read1(left)) or _SMALL
            ended = came.length == 0 or came.isclosed()
    except (OSError, http.client.HTTPException):  # they were not worth much
        return False
    return ended


def _is_closed(connection: http.client.HTTPConnection) -> bool:
    """Whether something came on a connection on which nothing is awaited: it was closed."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _close(connections: Iterable[tuple[float, http.client.HTTPConnection]]) -> None:
    for _, connection in connections:
        connection.close()
