"""`turnout eval RUN.yaml [--option value ...]`: score held-out prompts on a checkpoint, a version or an engine."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.cli.options import split_run_file
from turnout.config.load import load
from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError, Fault, WeightError

if TYPE_CHECKING:
    from turnout.rollout.evaluate import EvalPoint, NoPoint
    from turnout.schedule.score import Scored

USAGE = """usage: turnout eval RUN.yaml [--engine-url URL] [--json FILE] [--option value ...]

Scores the held-out prompts (--eval-prompt-data or --eval-config) of a run's configuration, as the run does:
  on a checkpoint      turnout eval RUN.yaml --hf-checkpoint RUN_DIR/weights/weight_v000060
  on a kept version    turnout eval RUN.yaml --run-dir RUN_DIR --version v000060
  on a running engine  turnout eval RUN.yaml --engine-url http://127.0.0.1:30000
A version that the run published as changes is put together from --hf-checkpoint, with which the run began. RUN.yaml
may be RUN_DIR/config.json. Options are those of `turnout train --help`. --json writes the scores to a file."""


def command(argv: list[str]) -> int:
    """Prints a line per set: score, 95 % interval, samples, version; exit status 5 where one has none."""
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE)
        return 0 if argv else 2
    url, argv = _own(argv, "--engine-url")
    target, argv = _own(argv, "--json")
    version, argv = _own(argv, "--version")
    run_dir, argv = _own(argv, "--run-dir")
    if (version is None) != (run_dir is None) or (version is not None and url is not None):
        raise ConfigError(Fault("--version", version or "", "goes with --run-dir, and not with --engine-url"))
    file, rest = split_run_file(argv)
    config = load(file, rest)
    if config.eval_prompt_data is None and config.eval_config is None:
        raise ConfigError(Fault("--eval-prompt-data", "", "is not given", "name the held-out prompts"))
    from turnout.placement.real import RealClock
    from turnout.schedule.score import Scored, score
    from turnout.train.model_zoo import resolve_checkpoint

    model = resolve_checkpoint(config.hf_checkpoint)
    with tempfile.TemporaryDirectory(prefix="turnout-eval-") as folder:
        what = Scored(model, url)
        if version is not None and run_dir is not None:
            what = _version(config, Path(run_dir), version, (model, Path(folder)))
        points = asyncio.run(score(config, what, RealClock()))
    rows = [_told(point) for point in points]
    if target is not None:
        Path(target).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return WeightError.exit_status if any("reason" in row for row in rows) else 0


def _version(config: RunConfig, run_dir: Path, text: str, places: tuple[Path, Path]) -> Scored:
    """The version `v000012` (or its number, or its label) of a run; `places` are the checkpoint with which the run
    began, and a folder to put the version together in."""
    from turnout.placement.real import DiskStore
    from turnout.schedule.score import Scored
    from turnout.weights.whole import whole_checkpoint

    found = re.fullmatch(r"(?:weight_)?v?(\d+)(?:-[0-9a-f]{16})?", text)
    if found is None:
        raise ConfigError(Fault("--version", text, "is no version", "give one as v000012"))
    weights = Path(config.weight_folder).expanduser() if config.weight_folder else run_dir / "weights"
    base, folder = places
    version, checkpoint = whole_checkpoint(
        weights, DiskStore(), int(found.group(1)), base, folder / "checkpoint"
    )
    return Scored(checkpoint, version=version)


def _told(point: EvalPoint | NoPoint) -> dict[str, Any]:
    """Prints a point; what of it goes into the JSON file."""
    from turnout.rollout.evaluate import NoPoint
    from turnout.schedule.finish import eval_score

    if isinstance(point, NoPoint):
        print(f"{point.name}: not scored: {point.reason}")
        return asdict(point)
    row = asdict(eval_score(point))
    passed = "".join(f", pass@{one.k} {one.value:.3f}" for one in point.pass_at)
    print(
        f"{point.name}: {point.score:.3f} [{row['low']:.3f}, {row['high']:.3f}] on {point.items} samples{passed}, "
        f"{point.failed} failed, version {point.version}"
    )
    ks = {str(one.k): one.value for one in point.pass_at}
    return {"name": point.name, **row, "version": point.version, "digest": point.digest, "pass_at": ks}


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
