"""What a run reads before it starts anything: tokenizer, prompts, held-out prompts, and the identity of these."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from turnout.config.run_config import RunConfig
from turnout.config.rundir import holds_run
from turnout.core.errors import ConfigError, Fault
from turnout.core.rng import SeedTree
from turnout.placement.devices import visible_gpus
from turnout.rollout.demonstrations import Demonstration, load_demonstrations
from turnout.rollout.prompts import Fingerprint, fingerprint, load_prompts
from turnout.rollout.source import PromptSource
from turnout.rollout.tokenizer import HubTokenizer, load_tokenizer
from turnout.schedule import wiring
from turnout.schedule.checkpoints import check_folders
from turnout.schedule.eval_sets import load_eval_plan
from turnout.schedule.evaluations import EvalPlan
from turnout.schedule.roster import check_gpus, roster
from turnout.schedule.run_models import check_models, check_tokens
from turnout.train.model_zoo import resolve_checkpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInputs:
    """What was loaded and checked before anything started. `steps` is None where only the data's end is known;
    `fingerprints` are those of prompts and held-out prompts; `models` are the folders of models besides the one
    that is trained, by what the configuration calls them; `shown` are the answers that --loss-type sft_loss trains
    on."""

    model: Path
    tokenizer: HubTokenizer
    source: PromptSource
    evals: EvalPlan
    steps: int | None
    fingerprints: tuple[Fingerprint, Fingerprint | None]
    models: Mapping[str, Path] = field(default_factory=dict)
    shown: Mapping[str, Demonstration] = field(default_factory=dict[str, Demonstration])


def load_inputs(config: RunConfig, model: Path) -> RunInputs:
    """Tokenizer, prompts and held-out prompts; raises UserError with what is wrong in them, or with a folder
    to save to that is in use."""
    if not holds_run(config):
        check_folders(config)
    check_gpus(config, visible_gpus())
    check_models(config)
    named = {plan.model_path for plan in roster(config)} - {None}
    models = {name: resolve_checkpoint(name) for name in sorted(map(str, named))}
    tokenizer = load_tokenizer(model)
    check_tokens(config, tokenizer, models)
    shown: dict[str, Demonstration] = {}
    if config.fine_tunes:
        longest = config.rollout_max_response_len
        prompts, shown = load_demonstrations(wiring.train_data(config), tokenizer, longest)
    else:
        prompts = load_prompts(wiring.train_data(config), tokenizer)
    source = PromptSource(prompts, SeedTree(config.seed), config.rollout_shuffle, config.num_epoch)
    wiring.filter_plan(config)  # refused before anything starts
    wiring.generate_function(config)
    if wiring.agent_function(config) is not None:
        tokenizer.require_chat_template()
    steps = _steps(config, source)
    evals, held_out = load_eval_plan(config, tokenizer), None
    path = config.eval_config if config.eval_prompt_data is None else config.eval_prompt_data
    if path is not None:
        spec = wiring.data(config, path, config.eval_keys)
        held_out = fingerprint(spec, [prompt for data in evals.sets for prompt in data.prompts])
    marks = fingerprint(wiring.train_data(config), prompts), held_out
    return RunInputs(model, tokenizer, source, evals, steps, marks, models, shown)


def _steps(config: RunConfig, source: PromptSource) -> int | None:
    """Train steps of the run as far as the data tells; raises ConfigError where there would be none."""
    asked, total, batch = config.num_rollout, source.total, config.rollout_batch_size
    if total is None:
        return asked
    full, left = divmod(total, batch)
    if config.last_batch == "train":
        full, left = full + (left > 0), 0
    if not full:
        reason = f"the data has {total} prompts, no batch of --rollout-batch-size {batch}"
        raise ConfigError(Fault("--last-batch", "drop", reason, "use --last-batch train, or a smaller batch"))
    if asked is not None and asked <= full:
        return asked
    if left:
        log.warning("the last %d prompts don't fill a batch and are left out (--last-batch drop)", left)
    if asked is not None:
        log.warning("the data ends after %d steps, before --num-rollout %d", full, asked)
    return full
