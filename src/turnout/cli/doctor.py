"""`turnout doctor RUN_DIR [--json]`: who waits for whom in a run, and why, on one line (docs/guides/failures.md).

Reads only; imports no torch. The exit status: 0 it moves, or has ended well; 3 it stalls; 1 its process is gone
without an end, or it ended badly; 2 there is no run.
"""

from __future__ import annotations

import json
import socket
import time

from turnout.cli.find_run import find_run
from turnout.cli.options import Parser
from turnout.observe.doctor import Seen, read_end, read_waits, verdict
from turnout.placement.processes import process_state


def command(argv: list[str]) -> int:
    """Prints the line; with --json what waits.json holds besides."""
    parser = Parser(prog="turnout doctor", description="Who waits for whom in a run, and why, on one line.")
    parser.add_argument("run", metavar="RUN_DIR", help="directory of a run")
    parser.add_argument("--json", action="store_true", help="print the whole picture")
    asked = parser.parse_args(argv)
    run = find_run(asked.run)
    waits = read_waits(run)
    here = waits.get("host") == socket.gethostname()
    process = process_state(waits["pid"]) if here else ""
    found = verdict(waits, read_end(run), Seen(time.time(), here, process))
    if asked.json:
        print(json.dumps({"status": found.status, "text": found.text, **found.row}, indent=1))
    else:
        print(found.text)
    return found.status
