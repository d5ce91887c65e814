"""`turnout bench NAME ...`: suites and measurements against an engine, one table of them."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from turnout.cli.options import Parser, token_from

BENCHES = {"conformance": "a black-box suite for any engine that speaks SGLang's API"}
TINY = "tiny:llama"


def command(argv: list[str]) -> int:
    """Runs one of BENCHES; its exit status."""
    parser = Parser(prog="turnout bench", description="Suites against an engine.")
    benches = parser.add_subparsers(dest="bench", required=True)
    _conformance_flags(benches.add_parser("conformance", help=BENCHES["conformance"]))
    return _conformance(parser.parse_args(argv))


def _conformance_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engine", default="embedded", help="URL, or embedded: start one (default)")
    add("--json", type=Path, help="file for the report")
    add("--model", help=f"the engine's checkpoint: folder or name (embedded: {TINY}; URL: what it names)")
    add("--only", action="append", default=[], metavar="REGEX", help="checks whose group.name matches")
    add("--skip", action="append", default=[], metavar="NAME", help="reported as absent, not run")
    add("--risky", action="store_true", help="also checks that may end an engine without the guard they test")
    add("--list", action="store_true", help="print the checks and what each proves")
    add("--admin-token-env", metavar="NAME", help="environment variable that holds the engine's token")
    add("--pd-peer", nargs=2, metavar=("PREFILL", "DECODE"), help="URLs of a PD pair on the same model")
    add("--work", type=Path, help="folder for the versions that updates load; the engine must see it")
    add("--timeout-s", type=float, default=240.0, help="of one check (default 240)")
    add("--engine-flag", action="append", default=[], metavar="FLAG=VALUE", help="of an embedded engine")


def _conformance(arguments: argparse.Namespace) -> int:
    from turnout.bench.conformance import EMBEDDED, Plan, conformance
    from turnout.bench.registry import CHECKS, Outcome, chosen
    from turnout.bench.report import line
    from turnout.bench.suite import Rules
    from turnout.placement.real import RealClock

    if arguments.list:
        for check in chosen(CHECKS, arguments.only):
            print(f"{check.group:<12} {check.name:<36} {check.line}")
        return 0
    group = ""

    def say(outcome: Outcome) -> None:
        nonlocal group
        if outcome.group != group:
            group = outcome.group
            print(group)
        print(line(outcome), flush=True)

    with tempfile.TemporaryDirectory(prefix="turnout-conformance-") as temporary:
        plan = Plan(
            engine=arguments.engine,
            model=_model(arguments.model if arguments.engine != EMBEDDED else arguments.model or TINY),
            work=arguments.work if arguments.work is not None else Path(temporary),
            rules=Rules(arguments.timeout_s, arguments.risky, frozenset(arguments.skip)),
            only=tuple(arguments.only),
            flags=tuple(f"--{flag}" for flag in arguments.engine_flag),
            pair=tuple(arguments.pd_peer) if arguments.pd_peer else None,
            token=token_from(arguments.admin_token_env, "--admin-token-env"),
        )
        report = asyncio.run(conformance(plan, RealClock(), say))
    if arguments.json is not None:
        arguments.json.write_text(report.to_json(), encoding="utf-8")
    print(report.summary())
    return report.exit_status


def _model(text: str | None) -> Path | None:
    if text is None:
        return None
    from turnout.train.model_zoo import resolve_checkpoint

    return resolve_checkpoint(text)
