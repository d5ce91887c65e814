"""`turnout engines ls|add|remove RUN_DIR ...`: the engines of a run that works, and how many there are.

Talks to the run by files in its directory (turnout.protocol.engine_requests). Promises: exit status 0 where it was
done, 3 where the run refused, 7 where nobody took the request, which is taken back then, or answered it in time.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from pathlib import Path

from turnout.cli.find_run import find_run
from turnout.cli.options import Parser
from turnout.core.errors import DeadlineExceeded
from turnout.placement.real import DiskStore
from turnout.protocol.engine_requests import ANSWERED, ASKED, FOLDER, EngineAnswer, EngineRequest

REFUSED = 3
POLL_S = 0.1
TAKEN_S = 10.0
COLUMNS = ("engine", "state", "version", "program", "worker_type", "ranks", "url")


def command(argv: list[str]) -> int:
    """Asks and prints the answer."""
    asked = _parser().parse_args(argv)
    request = EngineRequest(asked.verb, tuple(getattr(asked, "engines", ())), getattr(asked, "count", 1))
    answer = ask(find_run(asked.run), request, asked.deadline)
    if asked.json:
        print(
            json.dumps({"done": answer.done, "text": answer.text, "engines": list(answer.engines)}, indent=1)
        )
    elif answer.done:
        print(answer.text if asked.verb != "ls" else _table(answer))
    else:
        print(f"turnout: {answer.text}", file=sys.stderr)
    return 0 if answer.done else REFUSED


def ask(run: Path, request: EngineRequest, deadline_s: float) -> EngineAnswer:
    """The run's answer. Raises DeadlineExceeded where none answers."""
    files, name = DiskStore(), secrets.token_hex(8)
    asked, answered = run / FOLDER / f"{name}{ASKED}", run / FOLDER / f"{name}{ANSWERED}"
    asked.parent.mkdir(exist_ok=True)
    files.publish_file(asked, request.encode())
    end, taken_by = time.monotonic() + deadline_s, time.monotonic() + TAKEN_S
    while not answered.exists():
        now = time.monotonic()
        if now > min(taken_by, end) and asked.exists():
            asked.unlink(missing_ok=True)
            what = f"a run at work in {run} to take the request (it is taken back)"
            raise DeadlineExceeded(what, min(TAKEN_S, deadline_s))
        if now > end:
            what = "the run to answer; it has taken the request: see `turnout engines ls`"
            raise DeadlineExceeded(what, deadline_s)
        time.sleep(POLL_S)
    answer = EngineAnswer.decode(files.read(answered))
    answered.unlink(missing_ok=True)
    return answer


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="turnout engines", description="The engines of a run that works.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (
        ("ls", "list them: state, version, program, address"),
        (
            "add",
            "one more of the run's own engines, or those at addresses; each joins once it has proved a version",
        ),
        ("remove", "take engines out; what they make goes on elsewhere, and those of the run are stopped"),
    ):
        one = verbs.add_parser(verb, help=text, description=text)
        one.add_argument("run", metavar="RUN_DIR", help="directory of the run")
        if verb == "add":
            one.add_argument(
                "engines", nargs="*", metavar="HOST:PORT", help="engines that somebody else runs"
            )
            one.add_argument(
                "--count", type=int, default=1, choices=range(1, 65), metavar="N", help="how many"
            )
        elif verb == "remove":
            one.add_argument("engines", nargs="+", metavar="ID", help="as `ls` names them")
        one.add_argument("--deadline", type=float, default=300.0, metavar="S", help="for the answer (300)")
        one.add_argument("--json", action="store_true", help="print the whole answer")
    return parser


def _table(answer: EngineAnswer) -> str:
    rows = [COLUMNS, *(tuple(str(row.get(name, "")) for name in COLUMNS) for row in answer.engines)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )
