"""`turnout inspect RUN_DIR [question]`: what became of a run's groups, tokens, steps, versions and engines.

Reads only, also beside a run that goes on; imports no torch. The ledger is RUN_DIR/ledger.sqlite, or a file that is
named itself, such as a checkpoint's copy. The answers are made in turnout.cli.answers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from turnout.cli.answers import engines, groups, steps, tokens, versions
from turnout.cli.answers.run import LEDGER, Answer, Run
from turnout.cli.find_run import find_run
from turnout.cli.options import Parser
from turnout.core.errors import DataError, Fault

Lines = Callable[[Answer], Iterator[str]]


def command(argv: list[str]) -> int:
    """Prints what was asked for; raises ConfigError for what the run doesn't have."""
    asked = _parser().parse_args(argv)
    path = Path(asked.run)
    if not path.is_file() and not (path / LEDGER).exists():  # a checkpoint's folder has one as well
        path = find_run(asked.run)
    run = Run(path)
    try:
        answer, lines = _answer(run, asked)
        if asked.json:
            print(json.dumps(answer, indent=1, ensure_ascii=False))
        for line in lines(answer):  # with --json too: a check that fails raises here
            if not asked.json:
                print(line)
    finally:
        run.close()
    return 0


def _answer(run: Run, asked: argparse.Namespace) -> tuple[Answer, Lines]:
    if asked.token is not None or asked.member is not None:
        place = tokens.place(asked.token, asked.group, asked.member)
        return tokens.token(run, *place), tokens.token_lines
    if asked.group is not None:
        return groups.group(run, asked.group), groups.group_lines
    if asked.step is not None:
        return steps.step(run, asked.step), steps.step_lines
    if asked.version is not None:
        return versions.version(run, asked.version), versions.version_lines
    if asked.engine is not None:
        return engines.engine(run, asked.engine), engines.engine_lines
    if asked.trace is not None:
        return _trace(run, asked.trace), _file_lines
    if asked.plot:
        return _plots(run), _file_lines
    if asked.check:
        return groups.check(run), groups.check_lines
    if asked.why_dropped:
        return groups.why(run), groups.why_lines
    return groups.summary(run), groups.summary_lines


def _trace(run: Run, file: str) -> Answer:
    from turnout.observe.trace import trace

    path = run.folder / "trace.json" if not file else Path(file)
    path.write_bytes(trace(run.events, str(run.config.get("run_name") or run.folder.name)))
    return {"files": [str(path)]}


def _plots(run: Run) -> Answer:
    from turnout.observe.metrics import read_metrics
    from turnout.observe.plots import write_plots

    metrics = run.folder / "metrics.jsonl"
    if not metrics.is_file():
        raise DataError(
            Fault("metrics", str(metrics), "there is no such file", "name the directory of a run")
        )
    title = str(run.config.get("run_name") or run.folder.name)
    return {"files": [str(path) for path in write_plots(read_metrics(metrics), run.folder / "plots", title)]}


def _file_lines(told: Answer) -> Iterator[str]:
    yield from told["files"] or ["there is nothing to plot yet"]


def _parser() -> Parser:
    parser = Parser(
        prog="turnout inspect",
        description="What became of a run's groups: without a question, their number by state.",
    )
    parser.add_argument("run", metavar="RUN_DIR", help="directory of a run, or a ledger's file")
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--group", metavar="ID", help="the whole history of a group; a number names all its attempts"
    )
    what.add_argument(
        "--step", metavar="K", type=int, help="what the batch of this step was, and what it waited for"
    )
    what.add_argument(
        "--version",
        metavar="LABEL",
        help="a weight version, by its label or number: how it went out, who loaded it, what it made",
    )
    what.add_argument("--engine", metavar="NAME", help="its lives, losses, versions, requests and tokens")
    what.add_argument("--why-dropped", action="store_true", help="groups by the reason of their end")
    what.add_argument("--check", action="store_true", help="read all of it, and prove what it promises")
    what.add_argument(
        "--trace",
        metavar="FILE",
        nargs="?",
        const="",
        help="write the timeline for ui.perfetto.dev, to RUN_DIR/trace.json where no file is named",
    )
    what.add_argument("--plot", action="store_true", help="write PNG plots to RUN_DIR/plots")
    parser.add_argument(
        "--member", metavar="M", type=int, help="with --group and --token: its sample, from 0"
    )
    parser.add_argument(
        "--token",
        metavar="T",
        help="one token of a response, from 0: with --group and --member, or as ID:M:T",
    )
    return parser
