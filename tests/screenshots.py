"""Pictures of the dashboard and of the panel from real runs, for the documentation: `python -m tests.screenshots`.

Two runs of the examples: one that learns (examples/tiny.yaml, asynchronous, 2 engines), and one with an engine that
is killed and a tool that stalls (examples/trouble.yaml), whose waits are taken while it stalls. Writes
docs/images/dash-VIEW.png and panel.png, 1280 x 800, each at most MAX_BYTES.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path
from typing import Any

from benchmarks.dash import ARGUMENTS, CHROMIUM, served
from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
MAX_BYTES, DEADLINE_S = 150_000, 900.0
COLUMNS, LINES = 112, 40
LEARNS = [
    *("examples/tiny.yaml", "--schedule", "async", "--max-staleness", "2", "--rollout-num-engines", "2"),
    *("--engine-threads", "1", "--num-rollout", "60", "--eval-interval", "10", "--panel", "on"),
]
TROUBLE = ["examples/trouble.yaml"]
REDRAWN = re.compile(r"\r(?:\x1b\[2K)?(?:\x1b\[1A(?:\x1b\[2K)?)+")


def train(words: list[str], folder: Path, run_dir: str) -> str:
    """`turnout train` in a folder, on a terminal of its own; all that it wrote there."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    run = [sys.executable, "-m", "turnout.cli.main", "train", *words, "--run-dir", run_dir]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(run, cwd=folder, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = bytearray()
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end has closed
            break
        if not part:
            break
        said += part
    os.close(ours)
    assert process.wait(DEADLINE_S) == 0, said[-2000:].decode(errors="replace")
    return said.decode(errors="replace")


def panel(said: str) -> str:
    """The last picture of the panel that was drawn whole, with its colours."""
    frames = [
        frame for frame in REDRAWN.split(said) if "turnout" in frame and "dash" in frame and "╯" in frame
    ]
    return frames[-1].partition("╯")[0] + "╯"


def svg_page(text: str, title: str) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text.replace("\r\n", "\n")), "")
    svg = console.export_svg(title=title)
    svg = svg.replace("<svg ", "<svg width='1160' ", 1)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
    return f"<body style='margin:0;background:#fff;display:inline-block'>{svg}</body>"


def save(page: Any, name: str, **how: Any) -> None:
    path = IMAGES / name
    data = page.screenshot(**how)
    Image.open(io.BytesIO(data)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
    assert path.stat().st_size <= MAX_BYTES, f"{path}: {path.stat().st_size} bytes"
    print(path.relative_to(ROOT), path.stat().st_size, flush=True)


def shoot(browser: Any, url: str, views: dict[str, str], scheme: str = "light") -> None:
    """`views`: name of the picture -> place in the page."""
    page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    for name, place in views.items():
        page.goto(f"{url}#{place}")
        view = place.split("?")[0].split("/")[0].replace("group", "trajectories")
        page.wait_for_function(f"() => document.documentElement.dataset.ready === '{view}'")
        if place.startswith("group/"):
            page.wait_for_selector(".tokens .tok, .why")
            if page.query_selector(".tokens"):
                page.click("button:text-is('version')")
                page.focus(".tokens")
                for _ in range(9):
                    page.keyboard.press("ArrowRight")
        elif view == "trajectories":
            page.wait_for_selector("tr.row")
        page.wait_for_timeout(400)
        save(page, f"dash-{name}.png")
    page.close()


def asked(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        return json.load(answer)


def until(what: str, found: Callable[[], Any]) -> Any:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.5)
    raise TimeoutError(what)


def stalled(url: str) -> bool:
    """On the tool: a slow start is no trouble."""
    doctor = asked(url, "api/live/health")["head"]["doctor"]
    return doctor["status"] == 3 and "reward" in doctor["text"]


def longest(url: str) -> str:
    """Of the trained groups with tokens the one with most of them."""
    groups = asked(url, "api/groups?state=trained&limit=200")["groups"]
    return max((row for row in groups if row["stored"]), key=lambda row: row["tokens"])["group"]


def learns(browser: Any, folder: Path) -> None:
    run_dir = "runs/tiny-001"
    said, root = train(LEARNS, folder, run_dir), folder / run_dir
    page = browser.new_page(viewport={"width": 1280, "height": 800}, device_scale_factor=1)
    page.set_content(svg_page(panel(said), "turnout train"))
    save(page, "panel.png", full_page=False, clip=page.query_selector("svg").bounding_box())
    page.close()
    with served(root) as (_, url):
        until("the run to be read", lambda: asked(url, "api/live/health")["head"]["progress"] == 1)
        views = {name: name for name in ("overview", "distributions", "lanes", "weights", "buffer")}
        shoot(browser, url, views)
        shoot(browser, url, {"overview-dark": "overview", "lanes-dark": "lanes"}, "dark")


def troubled(browser: Any, root: Path) -> None:
    run = [sys.executable, "-m", "turnout.cli.main", "train", *TROUBLE, "--run-dir", str(root)]
    process = subprocess.Popen(
        run, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )
    try:
        until("the run's record", (root / "run.json").exists)
        with served(root) as (_, url):
            until("a stall", lambda: process.poll() is not None or stalled(url))
            shoot(browser, url, {"waits": "waits"})
            process.wait(DEADLINE_S)
            dropped = asked(url, "api/groups?state=dropped")["groups"]
            views = {"health": "health", "trajectories": "trajectories"}
            views |= {"trajectory": f"group/{longest(url)}"}
            shoot(browser, url, views | ({"dropped": f"group/{dropped[0]['group']}"} if dropped else {}))
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("learns", "troubled"), help="one of the two runs")
    only = parser.parse_args().only
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="turnout-pictures-") as folder, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        (Path(folder) / "examples").symlink_to(ROOT / "examples")  # what the files name lies there
        if only != "troubled":
            learns(browser, Path(folder))
        if only != "learns":
            troubled(browser, Path(folder) / "runs" / "trouble-001")
        browser.close()


if __name__ == "__main__":
    main()
