"""The dashboard on a run of 100,000 trajectories: `python -m benchmarks.dash [--trajectories N] --json FILE`.

    first_paint_s       from the navigation to the browser's first contentful paint, headless Chromium, median
    charts_s            from the navigation until the first view shows the run's numbers, median
    start_s, read_s     until the server answers; until it has read the whole run
    refresh_cpu_share   processor time of the server over wall time while a page is open and the run writes a step
                        every STEP_S seconds, as a share of one core; by view

The run is written by benchmarks.dash_run through the classes that a run writes with. `first_paint_s` is of a server
that has read the run; `cold_charts_s` of one that was started with the navigation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.dash_run import RunWriter, Shape
from benchmarks.machine import describe

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
]
STEP_S, REFRESH_S, TRIES = 2.0, 12.0, 3
VIEWS = ("overview", "distributions", "lanes", "weights", "buffer", "health", "waits", "trajectories")
PAINT = "() => (performance.getEntriesByName('first-contentful-paint')[0] || {}).startTime || null"


@contextlib.contextmanager
def served(root: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`turnout dash` as a process, and its address."""
    words = [sys.executable, "-m", "turnout.cli.main", "dash", str(root), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield process, line.split()[2]
    finally:
        process.terminate()
        process.wait(timeout=60)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def head_of(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}api/live/health", timeout=60) as answer:
        return json.load(answer)["head"]


def paint(browser: Any, url: str) -> tuple[float, float]:
    """(first contentful paint, numbers shown), in seconds from the navigation."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    try:
        begun = time.perf_counter()
        page.goto(url, wait_until="commit")
        page.wait_for_function("() => document.documentElement.dataset.ready === 'overview'", timeout=60_000)
        shown = time.perf_counter() - begun
        page.wait_for_function(f"{PAINT.replace(' || null', '')} > 0", timeout=60_000)
        return page.evaluate(PAINT) / 1000, shown
    finally:
        page.close()


def refresh(browser: Any, writer: RunWriter, view: str) -> float:
    """The server's share of a core with this view open on a run that goes on."""
    with served(writer.root) as (process, url):
        while head_of(url)["progress"] < 1:
            time.sleep(0.2)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"{url}#{view}")
        page.wait_for_function(f"() => document.documentElement.dataset.ready === '{view}'", timeout=60_000)
        time.sleep(3)
        begun, before = time.perf_counter(), cpu_s(process.pid)
        while time.perf_counter() - begun < REFRESH_S:
            writer.step()
            time.sleep(STEP_S)
        share = (cpu_s(process.pid) - before) / (time.perf_counter() - begun)
        page.close()
        return share


def measure(trajectories: int, folder: Path) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  the rest of this module needs no browser

    shape = Shape()
    steps = -(-trajectories // (shape.groups * shape.members))
    writer = RunWriter(folder / "run", shape, time.time() - steps * shape.step_s)
    for _ in range(steps):
        writer.step()
    print(f"wrote {steps} steps, {steps * shape.groups * shape.members} trajectories", flush=True)
    found: dict[str, Any] = {"trajectories": steps * shape.groups * shape.members, "steps": steps}
    found["events_mb"] = round((writer.root / "events.jsonl").stat().st_size / 1e6, 1)
    found["ledger_mb"] = round((writer.root / "ledger.sqlite").stat().st_size / 1e6, 1)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        paint(browser, "data:text/html,<html data-ready=overview>x")  # the browser's own start
        cold = []
        for _ in range(3):
            begun = time.perf_counter()
            with served(writer.root) as (_, url):
                started = time.perf_counter() - begun
                _, shown = paint(browser, url)
                while head_of(url)["progress"] < 1:
                    time.sleep(0.05)
                cold.append((started, shown, time.perf_counter() - begun - started))
        found |= {
            "start_s": _median(one[0] for one in cold),
            "cold_charts_s": _median(one[1] for one in cold),
        }
        found["read_s"] = _median(one[2] for one in cold)
        with served(writer.root) as (_, url):
            while head_of(url)["progress"] < 1:
                time.sleep(0.1)
            warm = [paint(browser, url) for _ in range(TRIES)]
        found |= {
            "first_paint_s": _median(one[0] for one in warm),
            "charts_s": _median(one[1] for one in warm),
        }
        print(json.dumps(found), flush=True)
        found["refresh_cpu_share"] = {view: round(refresh(browser, writer, view), 5) for view in VIEWS}
        found["refresh_cpu_share_max"] = max(found["refresh_cpu_share"].values())
        browser.close()
    writer.close(ended=True)
    return found


def _median(values: Any) -> float:
    return round(statistics.median(values), 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="turnout-dash-") as folder:
        row = {"benchmark": "dash", "machine": describe(), **measure(asked.trajectories, Path(folder))}
    print(json.dumps(row, indent=1))
    if asked.json is not None:
        asked.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
