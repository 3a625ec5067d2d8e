"""The page in a real browser, Chromium, against the real service."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image

from service.settings import Settings
from tests.service.conftest import reaches, running, submit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page
else:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")

import itertools

from playwright.sync_api import expect, sync_playwright

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (  # a browser that asks nobody but the service; without --no-sandbox root cannot start it
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
MARKUP = "\"><img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
REFUSED = "Failed to load resource: the server responded with a status of"
UNREACHABLE = f"{REFUSED} 503"  # /readyz of a service without a cluster

expect.set_options(timeout=30_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium on PATH (looked for {', '.join(NAMES)}): apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=QUIET)
        yield browser
        browser.close()


class Visit:
    """A page, what it complained of and what it asked for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.expected: tuple[str, ...] = ()
        """Beginnings of complaints that the test provokes."""
        self.asked: list[str] = []
        page.on("console", lambda message: self._complain(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: self._complain(f"uncaught: {error}"))
        page.context.on("request", lambda request: self.asked.append(request.url))

    def _complain(self, text: str) -> None:
        self.complaints.append(text)

    def open(self, client: httpx.Client, where: str = "#/") -> Page:
        self.page.goto(f"{client.base_url}/{where}".replace("//#", "/#"))
        self.page.evaluate("window.loaded = 'once'")
        return self.page

    def assert_clean(self) -> None:
        """Nothing unexpected in the console, nothing asked of anybody else, and the page was never reloaded."""
        assert [c for c in self.complaints if not c.startswith(self.expected or "\0")] == []
        here = urlsplit(self.page.url).netloc
        assert [url for url in self.asked if urlsplit(url).netloc != here and not url.startswith("blob:")] == []
        assert any(urlsplit(url).path == "/static/chart.js" for url in self.asked)
        assert self.page.evaluate("window.loaded") == "once"


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, locale="en-GB")
    visit = Visit(context.new_page())
    yield visit
    try:
        visit.assert_clean()
    finally:
        context.close()


def entry(page: Page, job_id: str) -> Locator:
    """A job in the list."""
    return page.locator("#jobs tbody").filter(has_text=job_id)


def figure(page: Page, name: str) -> Locator:
    return page.locator("#figures div").filter(has=page.get_by_text(name, exact=True)).locator("dd")


def line(page: Page, name: str) -> list[tuple[float, float]]:
    points = page.locator(f"#chart .{name}").get_attribute("points") or ""
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in points.split())]


def roughness(points: list[tuple[float, float]]) -> float:
    return sum(abs(b[1] - a[1]) for a, b in itertools.pairwise(points))


def labels(page: Page, axis: str) -> list[str]:
    return page.locator(f"#chart text.{axis}").all_text_contents()


def assert_fits(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def write_noisy_metrics(job: dict[str, str], first: int, last: int) -> None:
    """A loss that falls from 2 to 0.2 under much noise; the record written last wins where steps come again."""
    noise = random.Random(0)
    with (Path(job["output"]) / "metrics" / f"step-{first:08}.jsonl").open("w") as file:
        for step in range(first, last + 1):
            loss = 2 * 10 ** (-step / last) * noise.uniform(0.7, 1.4)
            speed = {"tokens_per_s": 51_200.0, "data_wait_share": 0.125, "step_seconds": 0.5}
            file.write(
                json.dumps({"step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3, "time": time.time()} | speed)
                + "\n"
            )


def write_picture(job: dict[str, str]) -> None:
    png = io.BytesIO()
    Image.new("RGB", (660, 340), "teal").save(png, "PNG")
    output = Path(job["output"])
    (output / "reconstruction.png").write_bytes(png.getvalue())
    (output / "summary.json").write_text(
        json.dumps({"held_out_model": 0.51, "held_out_baseline": 1.02, "held_out_windows": 4})
    )


def test_the_list_follows_jobs_without_a_reload(api: httpx.Client, visit: Visit) -> None:
    page = visit.open(api)
    large = {"workers": 4}
    first = submit(api, name="waits", parallel=large)
    expect(entry(page, first["id"]).locator(".state")).to_have_text("RUNNING")
    second = submit(api, name="quick", parallel=large)
    expect(entry(page, second["id"]).locator(".state")).to_have_text("QUEUED")
    expect(entry(page, second["id"]).locator(".why")).to_contain_text("waits for running jobs to end")
    assert page.locator("#jobs tbody small").all_text_contents()[:2] == [second["id"], first["id"]]  # newest first

    Path(first["output"], "go").touch()
    for job in (first, second):
        expect(entry(page, job["id"]).locator(".state")).to_have_text("SUCCEEDED")
    expect(entry(page, second["id"]).locator(".why")).to_be_hidden()


def test_a_job_is_watched_to_its_end(api: httpx.Client, visit: Visit) -> None:
    job = submit(api, name="waits", steps=300)
    reaches(api, job["id"], "RUNNING")
    page = visit.open(api)
    entry(page, job["id"]).get_by_role("link").click()
    expect(page.locator("#state")).to_have_text("RUNNING")
    expect(figure(page, "Step")).to_have_text("1 of 300")

    write_noisy_metrics(job, 1, 290)
    expect(figure(page, "Step")).to_have_text("290 of 300")
    expect(figure(page, "Tokens per second")).to_have_text("51.2 k")
    expect(figure(page, "Waiting for data")).to_have_text("12.5 %")
    expect(figure(page, "Time left, about")).to_have_text("5 s")
    expect(page.locator("#log")).to_contain_text("before 99")

    raw, curve = line(page, "raw"), line(page, "curve")
    assert len(raw) == 291  # steps 0 (the driver's) to 290
    box = page.locator("#chart").bounding_box()
    assert box is not None
    for x, y in raw + curve:
        assert 0 <= x <= box["width"]
        assert 0 <= y <= box["height"]
    assert raw == sorted(raw, key=lambda p: p[0])
    assert curve[10][1] < curve[-1][1] - 100, "the loss falls, and so does the curve (y points down)"
    assert roughness(curve) < roughness(raw) / 5
    assert [float(t) for t in labels(page, "x")] == sorted(range(0, 300, 20), key=float)
    up = [float(t) for t in labels(page, "y")]
    assert up == sorted(up)
    assert up[0] == 0
    assert len(up) >= 4

    page.get_by_label("logarithmic").check()
    assert labels(page, "y") != [f"{t:g}" for t in up]
    assert all(float(t) > 0 for t in labels(page, "y"))
    halves = line(page, "curve")
    middle = (halves[0][1] + halves[-1][1]) / 2
    assert abs(halves[145][1] - middle) < 15, "an exponential is straight on a logarithmic axis"

    chart = page.locator("#chart")
    chart.hover(position={"x": raw[100][0], "y": 50})
    expect(page.locator("#reading")).to_contain_text("step 100: ")
    page.get_by_label("Quantity").select_option(label="Tokens per second")
    expect(page.locator("#reading")).to_contain_text("step 100: 51.2 k")

    write_picture(job)
    Path(job["output"], "go").touch()
    expect(page.locator("#state")).to_have_text("SUCCEEDED")
    expect(page.locator("#log")).to_contain_text("after 99")
    picture = page.locator("#reconstruction")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.naturalWidth") == 660
    expect(page.locator("#held-out")).to_have_text(
        "error on 4 held-out windows: 0.51, mean of visible neighbours: 1.02"
    )
    expect(page.locator("#cancel")).to_be_hidden()
    assert_fits(page)
    page.get_by_role("link", name="Jobs", exact=True).click()
    expect(entry(page, job["id"])).to_be_visible()


def test_a_failed_job_says_why(api: httpx.Client, visit: Visit) -> None:
    job = submit(api, name="fails")
    page = visit.open(api, f"#/jobs/{job['id']}")
    expect(page.locator("#state")).to_have_text("FAILED")
    expect(page.locator("#reason")).to_contain_text("survey nowhere.mdio, chunk 3: no such object")
    expect(page.locator("#no-steps")).to_have_text("The job ended before its first step.")
    expect(page.locator("#figures")).to_be_hidden()
    expect(page.locator("#trouble")).to_be_hidden()


def test_a_job_is_cancelled_after_asking(api: httpx.Client, visit: Visit) -> None:
    job = submit(api, name="waits")
    reaches(api, job["id"], "RUNNING")
    page = visit.open(api, f"#/jobs/{job['id']}")
    page.locator("#cancel").click()
    page.get_by_role("button", name="Keep it running").click()
    expect(page.locator("#sure")).to_be_hidden()
    assert api.get(f"/jobs/{job['id']}").json()["state"] == "RUNNING"
    page.locator("#cancel").click()
    page.locator("#sure").get_by_role("button", name="Cancel job").click()
    expect(page.locator("#state")).to_have_text("CANCELLED")
    expect(page.locator("#cancel")).to_be_hidden()


def test_text_from_outside_stays_text(lonely: httpx.Client, tmp_path: Path, visit: Visit) -> None:
    visit.expected = (UNREACHABLE,)
    job = submit(lonely, surveys=[{"url": f"s3://surveys/{MARKUP}"}])
    with sqlite3.connect(tmp_path / "sfm.db") as database:  # past the checks of the API, which restrict names
        row = (f"name {MARKUP}", f"reason {MARKUP}", job["id"])
        database.execute("UPDATE jobs SET name = ?, reason = ?, state = 'FAILED' WHERE id = ?", row)
    (tmp_path / "logs" / f"{job['id']}.log").write_text(f"log {MARKUP}\n")

    page = visit.open(lonely)
    expect(entry(page, job["id"]).get_by_role("link")).to_have_text(f"name {MARKUP}")
    expect(entry(page, job["id"]).locator(".why")).to_have_text(f"reason {MARKUP}")
    assert_fits(page)
    entry(page, job["id"]).get_by_role("link").click()
    expect(page.locator("#name")).to_have_text(f"name {MARKUP}")
    expect(page.locator("#reason")).to_have_text(f"reason {MARKUP}")
    expect(page.locator("#log")).to_contain_text(f"log {MARKUP}")
    page.locator("summary").click()
    expect(page.locator("#spec")).to_contain_text(json.dumps(f"s3://surveys/{MARKUP}")[1:-1])
    assert_fits(page)
    assert page.locator("img").count() == 1, "only the picture's own"
    assert page.locator("body script").count() == 0
    assert page.evaluate("window.hacked") is None


def test_the_token_is_asked_for_until_it_is_right(tmp_path: Path, visit: Visit) -> None:
    visit.expected = (f"{REFUSED} 401", UNREACHABLE)
    settings = Settings(state_dir=tmp_path, ray_address="http://127.0.0.1:9", preflight=False, token="right")
    with running(settings) as client:
        job = submit(client)
        page = visit.open(client)
        field = page.get_by_label("It was set with SFM_TOKEN")
        field.fill("wrong")
        page.keyboard.press("Enter")
        field = page.get_by_label("It refused the one that was given")
        expect(field).to_have_value("")
        assert page.locator("#jobs tbody").count() == 0
        field.fill("right")
        page.get_by_role("button", name="Continue").click()
        expect(entry(page, job["id"]).locator(".state")).to_have_text("QUEUED")
        expect(page.locator("#ask")).to_be_hidden()
        assert not [url for url in visit.asked if "right" in url]
        assert page.evaluate("localStorage.length + document.cookie.length") == 0


def test_empty_and_broken_states_are_sentences(lonely: httpx.Client, visit: Visit) -> None:
    visit.expected = (UNREACHABLE, f"{REFUSED} 404", "Failed to load resource: net::ERR_FAILED", "TypeError")
    page = visit.open(lonely)
    expect(page.locator("#empty")).to_contain_text("No jobs yet")
    expect(page.locator("#health")).to_have_class("bad")
    expect(page.locator("#health")).to_contain_text(re.compile("Ray"))

    page.goto(f"{lonely.base_url}/#/jobs/0123456789ab".replace("//#", "/#"))
    expect(page.locator("#trouble")).to_contain_text("there is no job 0123456789ab")
    expect(page.locator("#job")).to_be_hidden()
    page.get_by_role("link", name="Jobs", exact=True).click()
    expect(page.locator("#empty")).to_be_visible()
    expect(page.locator("#trouble")).to_be_hidden()

    page.route("**/jobs*", lambda route: route.abort())
    expect(page.locator("#trouble")).to_contain_text("The service does not answer")
    page.unroute("**/jobs*")
    expect(page.locator("#trouble")).to_be_hidden()
