"""Settings of the control plane: environment variables `SFM_*`, each with a default that works on a laptop."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from sfm.spec import SfmError, absolute_url


class SettingsError(SfmError):
    """The service is configured in a way that cannot work or is not safe."""


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Settings(BaseSettings):
    """Read from the environment (`SFM_STATE_DIR`, ...); command line options override it."""

    model_config = SettingsConfigDict(env_prefix="SFM_", use_attribute_docstrings=True)

    state_dir: Path = Path(".sfm")
    """Directory for the database, job logs and the address of our own Ray head; default `.sfm`."""
    database_url: str = ""
    """SQLAlchemy URL; default: SQLite in `state_dir`."""
    host: str = "127.0.0.1"
    """Address to listen on; one that others can reach needs `token`. Default 127.0.0.1."""
    port: int = Field(8100, ge=0, le=65535)
    """TCP port; 0 takes a free one; default 8100."""
    token: str | None = None
    """Bearer token that every request must carry, save health checks and the page itself; default none."""
    ray_address: str = "local"
    """`local`: start a Ray head here, or re-join the one we started; else the URL of a cluster's
    dashboard (`http://host:8265`). Default local."""
    ray_num_cpus: int = Field(default_factory=lambda: max(8, os.cpu_count() or 1), ge=1)
    """Logical CPUs of our own head (workers reserve them, nothing enforces them); default: at least 8."""
    max_cpus: float = Field(0, ge=0)
    """Logical CPUs to which the cluster grows by itself; default 0: it is as large as it is now."""
    max_gpus: float = Field(0, ge=0)
    """GPUs to which the cluster grows by itself; default 0."""
    output: str = ""
    """Root URL (local path or `s3://`) of job outputs; default `state_dir`/runs."""
    entrypoint: str = "python -m sfm.train --config job.yaml"
    """Shell command that Ray runs in a directory which holds job.yaml."""
    preflight: bool = True
    """Whether a job's surveys are opened before it is accepted; turn off where the control plane cannot
    reach the store that the workers read. Default true."""
    poll_seconds: float = Field(1.0, gt=0)
    """Longest time between two comparisons of the database with Ray (seconds); default 1."""

    @model_validator(mode="after")
    def _complete(self) -> Settings:
        self.state_dir = self.state_dir.expanduser().absolute()
        self.database_url = self.database_url or f"sqlite:///{self.state_dir / 'sfm.db'}"
        self.output = absolute_url(self.output or str(self.state_dir / "runs"), Path.cwd()).rstrip("/")
        self.token = self.token or None  # SFM_TOKEN= (empty) is no token
        if not self.token and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached by others, who could then run code here: set SFM_TOKEN to a long "
                "random text, or listen on 127.0.0.1"
            )
        if self.ray_address != "local" and not self.ray_address.startswith(("http://", "https://")):
            raise ValueError(
                f"ray_address {self.ray_address} must be 'local' or a dashboard URL such as http://head:8265"
            )
        return self


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment; `overrides` that are not None win.

    Raises:
        SettingsError: one sentence per mistake, naming the setting.
    """
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        lines = []
        for e in error.errors():
            name = "".join(f"SFM_{str(part).upper()}: " for part in e["loc"])
            lines.append(name + e["msg"].removeprefix("Value error, "))
        raise SettingsError("\n".join(lines)) from None
