"""The web page: one HTML file and its script and style, from the package. Nothing is fetched from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

FILES = Path(__file__).parent.parent / "console"

router = APIRouter(include_in_schema=False)
static = StaticFiles(directory=FILES)


@router.get("/")
def page() -> FileResponse:
    return FileResponse(FILES / "index.html", headers={"Cache-Control": "no-cache"})
