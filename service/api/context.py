"""What the routes share: made once when the service starts, found through the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from service.cluster.jobs import Cluster
from service.jobs.logs import Logs
from service.jobs.reconciler import Reconciler
from service.jobs.store import Store
from service.settings import Settings


@dataclass(frozen=True)
class Context:
    settings: Settings
    store: Store
    cluster: Cluster
    logs: Logs
    reconciler: Reconciler


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Shared = Annotated[Context, Depends(_context)]
