"""`turnout weights map RUN.yaml`: which elements of the checkpoint each rank of trainer and engines holds, and
what an update moves. Changes nothing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from turnout.cli.options import Parser, split_run_file
from turnout.config.load import load
from turnout.core.errors import WeightError

if TYPE_CHECKING:
    from turnout.config.run_config import RunConfig
    from turnout.weights.map_types import RolloutTopology, TrainTopology

DTYPES = {"bfloat16": "BF16", "float32": "F32"}


def command(argv: list[str]) -> int:
    """Prints the map; the exit status is that of WeightError where something does not fit. What is not known here
    are options of `turnout train`."""
    parser = Parser(
        prog="turnout weights map",
        description="What each rank holds, and what an update moves.",
    )
    parser.add_argument("run", help="a run's YAML file; more options of `turnout train` may follow")
    parser.add_argument(
        "--trainer", metavar="SIZES", help="other sizes than the run's: dp=2,tp=2,layout=megatron"
    )
    parser.add_argument(
        "--engines", metavar="SIZES", help="other sizes than the run's: engines=2,tp=2,layout=sglang"
    )
    parser.add_argument(
        "--was-trainer", metavar="SIZES", help="tell what changes from a trainer with these on"
    )
    parser.add_argument("--was-engines", metavar="SIZES", help="tell what changes from engines with these on")
    parser.add_argument(
        "--full", action="store_true", help="a line for each tensor of each rank and each move"
    )
    return _show(*parser.parse_known_args(argv))


def _show(arguments: argparse.Namespace, options: list[str]) -> int:
    from turnout.train.model_zoo import resolve_checkpoint
    from turnout.weights.map import make_map, read_model
    from turnout.weights.map_plan import plan
    from turnout.weights.map_report import diff, report

    config = load(*split_run_file([arguments.run, *options]))
    model = read_model(resolve_checkpoint(config.hf_checkpoint))
    trainer = _trainer(config, arguments.trainer)
    rollout = _rollout(config, arguments.engines)
    found = make_map(model, trainer, rollout)
    moves = None if found.problems else plan(found, config.update_weight_buffer_size)
    print("\n".join(report(found, moves, arguments.full)))
    if arguments.was_trainer is None and arguments.was_engines is None:
        return WeightError.exit_status if found.problems else 0
    before = make_map(
        model,
        _trainer(config, arguments.was_trainer) if arguments.was_trainer is not None else trainer,
        _rollout(config, arguments.was_engines) if arguments.was_engines is not None else rollout,
    )
    for problem in before.problems:
        print(f"problem  before: {problem.line()}")
    if before.problems or moves is None:
        return WeightError.exit_status
    print(
        "\nchanged  "
        + "\nchanged  ".join(diff(before, found, (plan(before, config.update_weight_buffer_size), moves)))
    )
    return 0


def _trainer(config: RunConfig, text: str | None) -> TrainTopology:
    from turnout.weights.map_types import TrainTopology, parse

    return parse(text or "", TrainTopology(dtype=DTYPES[config.dtype]))


def _rollout(config: RunConfig, text: str | None) -> RolloutTopology:
    from turnout.weights.map_types import parse

    return parse(text or "", _engines(config))


def _engines(config: RunConfig) -> RolloutTopology:
    """Those of the run that get its weights; where their groups differ, as many engines like the first one's."""
    from turnout.weights.map_types import RolloutTopology

    count, dtype = config.updated_engines, DTYPES[config.dtype]
    first = next(group for group in config.groups if group.updated)
    if first.program == "embedded":
        block = (128, 128) if config.engine_quantization == "fp8" else None
        ep = int(dict(first.overrides).get("ep_size", config.engine_expert_parallel_size))
        return RolloutTopology(count, first.ranks, ep=ep, dtype=dtype, block=block)
    return RolloutTopology(count, layout="sglang", dtype=dtype)  # other sizes are refused in a run
