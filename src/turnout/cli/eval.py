"""`turnout eval RUN.yaml [--engine-url URL] [--json FILE] [--option value ...]`: score held-out prompts."""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from turnout.cli.options import split_run_file
from turnout.config.load import load
from turnout.core.errors import ConfigError, Fault

USAGE = """usage: turnout eval RUN.yaml [--engine-url URL] [--json FILE] [--option value ...]

Scores the held-out prompts (--eval-prompt-data) of a run's configuration, with its evaluation options:
  on a checkpoint      turnout eval RUN.yaml --hf-checkpoint RUN_DIR/weights/weight_v000060
  on a running engine  turnout eval RUN.yaml --engine-url http://127.0.0.1:30000
Options are those of `turnout train --help`. --json writes the scores to a file."""


def command(argv: list[str]) -> int:
    """Prints one line per evaluation set: score, 95 % interval, items, version."""
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE)
        return 0 if argv else 2
    url, argv = _own(argv, "--engine-url")
    target, argv = _own(argv, "--json")
    file, rest = split_run_file(argv)
    config = load(file, rest)
    if config.eval_prompt_data is None:
        raise ConfigError(Fault("--eval-prompt-data", "", "is not given", "name the held-out prompts"))
    from turnout.placement.real import RealClock
    from turnout.schedule.finish import eval_score
    from turnout.schedule.score import score
    from turnout.train.model_zoo import resolve_checkpoint

    model = resolve_checkpoint(config.hf_checkpoint)
    with tempfile.TemporaryDirectory(prefix="turnout-eval-") as folder:
        points = asyncio.run(score(config, model, url, Path(folder), RealClock()))
    rows = []
    for point in points:
        row = asdict(eval_score(point))
        rows.append({"name": point.name, **row, "version": point.version, "digest": point.digest})
        print(
            f"{point.name}: {point.score:.3f} [{row['low']:.3f}, {row['high']:.3f}] on {point.items} samples, "
            f"{point.failed} failed, version {point.version}"
        )
    if target is not None:
        Path(target).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


def _own(argv: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Takes a flag of this command, as `--flag value` or `--flag=value`, out of the words."""
    for at, word in enumerate(argv):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2], [*argv[:at], *argv[at + 1 :]]
        if word == flag:
            if at + 1 == len(argv):
                raise ConfigError(Fault(flag, "", "needs a value"))
            return argv[at + 1], [*argv[:at], *argv[at + 2 :]]
    return None, argv
