"""`turnout doctor RUN_DIR [--json]`: who waits for whom in a run, and why, on one line; below it what went wrong
lately (docs/guides/failures.md).

Reads only; imports no torch. The exit status: 0 it moves, or has ended well; 3 it stalls; 1 its process is gone
without an end, or it ended badly; 2 there is no run.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnout.cli.find_run import find_run
from turnout.cli.options import Parser
from turnout.observe.doctor import Seen, read_end, read_waits, verdict
from turnout.observe.troubles import troubles
from turnout.placement.processes import process_state

TAIL_BYTES = 1 << 20


def command(argv: list[str]) -> int:
    """Prints the line, and what went wrong; with --json what waits.json holds besides."""
    parser = Parser(
        prog="turnout doctor",
        description="Who waits for whom in a run, and why, on one line; below it what went wrong lately.",
    )
    parser.add_argument("run", metavar="RUN_DIR", help="directory of a run")
    parser.add_argument("--json", action="store_true", help="print the whole picture")
    asked = parser.parse_args(argv)
    run = find_run(asked.run)
    waits = read_waits(run)
    here = waits.get("host") == socket.gethostname()
    process = process_state(waits["pid"]) if here else ""
    found = verdict(waits, read_end(run), Seen(time.time(), here, process))
    lately = troubles(last_events(run / "events.jsonl"), time.time())
    if asked.json:
        print(
            json.dumps({"status": found.status, "text": found.text, "lately": lately, **found.row}, indent=1)
        )
    else:
        print("\n  ".join([found.text, *lately]))
    return found.status


def last_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events in the last TAIL_BYTES of the file, oldest first; none where there is no file yet."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).split(b"\n")
    except FileNotFoundError:
        return
    for line in lines[1 if start else 0 : -1]:  # the first may be cut, the last is not written yet
        with contextlib.suppress(ValueError):
            yield json.loads(line)
