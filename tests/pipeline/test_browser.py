"""MLflow and the report page as a person sees them: a real Chromium opens, selects, compares and looks at pictures."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from projects import commit_tree

from tilerank import tracking
from tilerank.config import load_settings
from tilerank.kernels.registry import attention_rows
from tilerank.report import Record, build_report, read_records

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
PATIENCE = 30_000  # milliseconds that an element may take to appear: the first page of a cold server is slow


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """Headless Chromium with a fresh profile."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser test needs the package playwright")
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUM)} is on the PATH")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, headless=True, args=list(FLAGS))
        yield opened
        opened.close()


# --- MLflow ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabBook:
    """`make ui` in a fresh clone: its root, the server's address and the page of the ladder."""

    root: Path
    address: str
    ladder: str


@pytest.fixture(scope="module")
def lab_book(repository: Path, empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabBook]:
    root = tmp_path_factory.mktemp("clone")
    commit_tree(repository, root)
    shutil.copy(empty_store, root)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "BROWSER": "true"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "stages.ui", "--port", str(port)]
    with subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            found = {}
            for line in server.stdout:
                label, _, page = line.strip().partition(": ")
                found[label] = page
                if line.startswith("Stop"):
                    break
            assert "Ladder" in found, found
            yield LabBook(root, f"http://127.0.0.1:{port}", found["Ladder"])
        finally:
            server.send_signal(signal.SIGTERM)


@pytest.fixture
def page(browser, lab_book: LabBook) -> Iterator:
    """MLflow on the ladder, every rung listed."""
    opened = browser.new_page(viewport={"width": 1900, "height": 1200})
    opened.set_default_timeout(PATIENCE)
    opened.goto(lab_book.ladder)
    yield opened
    opened.close()


def recorded(lab_book: LabBook) -> tuple[Record, ...]:
    """The records of the machine that the clone is set to."""
    machine = load_settings(lab_book.root / "params.yaml").machine.name
    return read_records(lab_book.root / "metrics" / machine)


def timed_rungs(lab_book: LabBook) -> dict[str, float]:
    """Variant -> microseconds, in ladder order, of the machine with the record."""
    times = {}
    for record in recorded(lab_book):
        for variant, values in record.values.get("ladder", {}).items():
            if "us" in values:
                times[variant] = values["us"]
    return {row.name: times[row.name] for row in attention_rows() if row.name in times}


def bars(lab_book: LabBook) -> int:
    """Variants and precisions that have a time; `ping_pong` for one has none on the ladder's workload."""
    sections = [
        section
        for record in recorded(lab_book)
        for section in (record.values.get("ladder", {}), *record.values.get("rungs", {}).values())
    ]
    return sum("us" in values for section in sections for values in section.values())


def test_two_rungs_are_selected_compared_and_charted(page, lab_book: LabBook) -> None:
    from playwright.sync_api import expect

    times = timed_rungs(lab_book)
    first, *_, last = times
    # The charts: the ladder's own metric has one, with a bar for every run that has a time, at 16 bit too.
    listed = page.get_by_text(re.compile(r"[1-9]\d* matching runs"))
    runs = int(re.search(r"(\d+) matching runs", listed.inner_text())[1])
    timed = bars(lab_book)
    assert runs >= timed >= len(times) > 10, "more than MLflow draws of its own"
    page.get_by_placeholder("Search metric charts").fill("ladder/us")
    chart = page.locator(".js-plotly-plot").first
    # Runs arrive one page after another, and each page draws the chart anew: only a count that waits is safe.
    expect(chart.locator(".bars .point")).to_have_count(timed, timeout=PATIENCE)
    # Two rungs, compared.
    for name in (first, last):
        row = page.locator(".ag-row").filter(has=page.get_by_role("link", name=name, exact=True))
        row.first.locator("input.ag-checkbox-input").check(force=True)
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("Comparing 2 Runs from 1 Experiment").wait_for()
    chooser = page.get_by_role("combobox").nth(1)
    chooser.click()
    page.keyboard.type("ladder/us")
    page.get_by_title("ladder/us", exact=True).last.click()
    plot = page.locator(".js-plotly-plot").first
    plot.get_by_text("ladder/us").first.wait_for()
    text = page.locator("body").inner_text()
    for name in (first, last):
        assert name in text


def test_a_run_says_what_it_tried_and_shows_its_picture(page, lab_book: LabBook) -> None:
    *_, last = timed_rungs(lab_book)
    page.get_by_role("link", name=last, exact=True).first.click()
    page.get_by_text("About this run").wait_for()
    described = page.locator("body").inner_text()
    assert "Tried" in described
    page.get_by_role("button", name="Show more").or_(page.get_by_text("Show more")).first.click()
    page.get_by_role("heading", name="Did ranking change?").wait_for()
    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_text("pictures", exact=True).click()
    page.get_by_text("ladder.svg", exact=True).click()
    picture = page.locator('img[alt="pictures/ladder.svg"]')
    picture.wait_for()
    shown = picture.evaluate("picture => picture.decode().then(() => [picture.clientWidth, picture.clientHeight])")
    assert min(shown) > 100, f"the picture is {shown} pixels"


def test_live_runs_reach_a_server(lab_book: LabBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", lab_book.address)
    settings = load_settings(lab_book.root / "params.yaml")
    picture = tmp_path / "picture.svg"
    picture.write_text("<svg/>", encoding="utf-8")
    for stage in ("one", "two"):
        with tracking.stage_run(tmp_path, settings, stage, "abc", {"gpu": "T4"}) as run:
            run.log_metrics({"rerank": {"fp32": {"ms": 3.5}}})
            run.log_artifact(picture)
    client = tracking.open_client(tmp_path)
    logged = client.get_run(run.run_id)
    assert (logged.info.status, logged.data.metrics) == ("FINISHED", {"rerank.fp32.ms": 3.5})
    assert client.get_run(logged.data.tags["mlflow.parentRunId"]).info.status == "FINISHED"
    assert [item.path for item in client.list_artifacts(run.run_id)] == ["picture.svg"]
    assert not (tmp_path / tracking.STORE_FILE).exists(), "nothing is kept beside the server"


# --- the report page -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the committed record."""
    machine = load_settings(repository / "params.yaml").machine.name
    predictions = {row.name: row.prediction for row in attention_rows()}
    built = build_report(read_records(repository / "metrics" / machine), machine, predictions)
    path = tmp_path_factory.mktemp("report") / "index.html"
    path.write_text(built.page, encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_report_is_whole_on_a_phone_and_a_desk_in_light_and_dark(
    browser, report: Path, scheme: str, width: int
) -> None:
    opened = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    said, asked = [], []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(report.as_uri())
    assert said == [], "the console is silent"
    assert asked == [report.as_uri()], "nothing but the page itself is loaded"
    pictures = opened.locator("figure svg")
    assert pictures.count() == len(re.findall("<figure", report.read_text(encoding="utf-8"))) >= 5
    for picture in pictures.all():
        box = picture.bounding_box()
        assert box["width"] > 300, picture.get_attribute("aria-label")
        assert box["height"] > 60, picture.get_attribute("aria-label")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width, "tables scroll, the page does not"
    paper, ink = opened.evaluate(
        "['backgroundColor', 'color'].map(name => getComputedStyle(document.body)[name].match(/\\d+/g).map(Number))"
    )
    assert (sum(paper) > sum(ink)) == (scheme == "light")
    assert abs(sum(paper) - sum(ink)) > 450, "text stands out from the page"
    sizes = opened.evaluate(
        "[...document.querySelectorAll('figure svg text')].map(text => text.getBoundingClientRect().height)"
    )
    assert min(size for size in sizes if size) > 8, "text in pictures is readable"
    opened.close()
