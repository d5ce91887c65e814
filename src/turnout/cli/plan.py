"""`turnout plan RUN.yaml`: which layout, schedule, transport and sizes (docs/guides/plan.md)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from turnout.core.errors import ConfigError, Fault

NOTHING_FITS = 1
MOST = 1e9


def command(argv: list[str]) -> int:
    """Prints the plan; 0, or 1 where nothing fits. Other options are the run's."""
    from turnout.plan.make import Asked, plan_of
    from turnout.plan.report import render, to_json

    asked, own = _parser().parse_known_args(argv)
    for flag, value in (("--length-scale", asked.length_scale), ("--prompt-tokens", asked.prompt_tokens)):
        if not 0 < value < MOST:
            raise ConfigError(Fault(flag, f"{value:g}", f"needs a number above 0 and below {MOST:g}"))
    scale, prompt = asked.length_scale, asked.prompt_tokens
    plan = plan_of(Asked(asked.run, tuple(own), asked.cluster_file, tuple(asked.calibrate), scale, prompt))
    print(json.dumps(to_json(plan), indent=1) if asked.json else render(plan))
    return 0 if plan.best is not None else NOTHING_FITS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="turnout plan",
        allow_abbrev=False,
        description="Recommends layout, schedule, transport and sizes for a run, from a model of memory and time. "
        "Options of `turnout train` may follow.",
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN.yaml", help="the run's file")
    add("--cluster-file", type=Path, metavar="CLUSTER.yaml", help="the machines (default: this one)")
    add(
        "--calibrate",
        type=Path,
        action="append",
        default=[],
        metavar="RUN_DIR",
        help="take durations and lengths from this run of --schedule sync; may be given again",
    )
    add("--length-scale", type=float, default=1.0, metavar="F", help="responses F times as long as measured")
    add("--prompt-tokens", type=float, default=256.0, metavar="N", help="of a prompt, where no run told")
    add("--json", action="store_true", help="everything, for programs")
    return parser
