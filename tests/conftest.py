"""What tests of several packages share: one real Ray cluster per session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.cluster import head


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[head.Head]:
    """A head with 8 logical CPUs on loopback; `ray_head.environment` is what a client process needs."""
    state_dir: Path = tmp_path_factory.mktemp("ray")
    found = head.start_or_rejoin(state_dir, num_cpus=8)
    try:
        yield found
    finally:
        head.stop(state_dir)
