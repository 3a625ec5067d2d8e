"""The command line's side of the API."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import httpx

from sfm.spec import SfmError

RECONNECT_SECONDS = 60.0


class ClientError(SfmError):
    """The service refused, or does not answer."""


class Client:
    """Talks to the service at `SFM_URL` (default http://127.0.0.1:8100), with `SFM_TOKEN` if it is set."""

    def __init__(self) -> None:
        self.url = os.environ.get("SFM_URL", "http://127.0.0.1:8100").rstrip("/")
        token = os.environ.get("SFM_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # A submission opens surveys and may take a minute.
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=120.0)

    def request(self, method: str, path: str, **options: Any) -> Any:
        """The decoded answer.

        Raises:
            ClientError: with the service's sentence.
        """
        try:
            response = self._http.request(method, path, **options)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._silent(error) from None
        if response.is_error:
            raise _refusal(response)
        return response.json()

    def log(self, job_id: str, *, follow: bool) -> Iterator[bytes]:
        """A job's log; `follow` stays until the job ends, over restarts of the service of up to a minute.

        Raises:
            ClientError
        """
        offset = 0
        silent_since: float | None = None
        while True:
            params = {"follow": follow, "offset": offset}
            timeout = httpx.Timeout(30.0, read=None)
            try:
                with self._http.stream("GET", f"/jobs/{job_id}/logs", params=params, timeout=timeout) as response:
                    if response.is_error:
                        response.read()
                        raise _refusal(response)
                    silent_since = None
                    for part in response.iter_raw():
                        offset += len(part)
                        yield part
                return
            except httpx.TransportError as error:  # the service was restarted: go on at the same byte
                silent_since = silent_since or time.monotonic()
                if not follow or time.monotonic() - silent_since > RECONNECT_SECONDS:
                    raise self._silent(error) from None
                time.sleep(0.5)

    def _silent(self, error: Exception) -> ClientError:
        return ClientError(f"no answer from {self.url} ({error}); is 'sfm serve' running, and is SFM_URL right?")


def _refusal(response: httpx.Response) -> ClientError:
    try:
        return ClientError(str(response.json()["detail"]))
    except (ValueError, LookupError, TypeError):
        return ClientError(f"{response.request.url} answers {response.status_code}, which is not this service")
