"""What a run reads before it starts anything: tokenizer, prompts, held-out prompts, and the identity of these."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from turnout.config.run_config import RunConfig
from turnout.config.rundir import holds_run
from turnout.core.rng import SeedTree
from turnout.core.types import Prompt
from turnout.rollout.evaluate import EvalSet
from turnout.rollout.prompts import Fingerprint, fingerprint, load_prompts
from turnout.rollout.source import PromptSource
from turnout.rollout.tokenizer import HubTokenizer, load_tokenizer
from turnout.schedule import wiring
from turnout.schedule.checkpoints import check_folders
from turnout.schedule.evaluations import EvalPlan

HELD_OUT, SAMPLED, BASELINE = "held-out", "held-out, sampled", "baseline"


@dataclass(frozen=True)
class RunInputs:
    """What was loaded and checked before anything started. `steps` is None where only the data's end is known;
    `fingerprints` are those of prompts and held-out prompts."""

    model: Path
    tokenizer: HubTokenizer
    source: PromptSource
    evals: EvalPlan
    steps: int | None
    fingerprints: tuple[Fingerprint, Fingerprint | None]


def load_inputs(config: RunConfig, model: Path) -> RunInputs:
    """Tokenizer, prompts and held-out prompts; raises UserError with what is wrong in them, or with a folder
    to save to that is in use."""
    if not holds_run(config):
        check_folders(config)
    tokenizer = load_tokenizer(model)
    prompts = load_prompts(wiring.train_data(config), tokenizer)
    source = PromptSource(prompts, SeedTree(config.seed), config.rollout_shuffle, config.num_epoch)
    steps = config.num_rollout
    if source.total is not None:
        by_data = -(-source.total // config.rollout_batch_size)
        steps = by_data if steps is None else min(steps, by_data)
    evals = eval_plan(config, tokenizer)
    held_out = None
    if config.eval_prompt_data is not None:
        spec = wiring.eval_data(config, config.eval_prompt_data)
        held_out = fingerprint(spec, list(evals.sets[0].prompts))
    marks = fingerprint(wiring.train_data(config), prompts), held_out
    return RunInputs(model, tokenizer, source, evals, steps, marks)


def eval_plan(config: RunConfig, tokenizer: HubTokenizer) -> EvalPlan:
    """Held-out sets of the configuration, loaded; raises UserError as load_prompts does."""

    def prompts(path: str) -> list[Prompt]:
        return load_prompts(wiring.eval_data(config, path), tokenizer)[: config.eval_num_prompts]

    sets: list[EvalSet] = []
    before_only: list[EvalSet] = []
    if config.eval_prompt_data is not None:
        held_out = prompts(config.eval_prompt_data)
        sets = [EvalSet(HELD_OUT, held_out, wiring.eval_plan(config, config.eval_temperature))]
        if config.eval_sampled:
            plan = wiring.eval_plan(config, config.rollout_temperature)
            sets.append(EvalSet(SAMPLED, held_out, plan))
    if config.eval_baseline_data is not None:
        plan = wiring.eval_plan(config, config.eval_temperature)
        before_only = [EvalSet(BASELINE, prompts(config.eval_baseline_data), plan)]
    return EvalPlan(sets, before_only, config.eval_interval, config.skip_eval_before_train)
