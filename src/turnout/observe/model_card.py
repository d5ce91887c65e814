"""The card of a model that a run made: what it was made from, how, and what came of it, from the run's own files.

Pure. Promises: nothing is said that the files don't say; paths of this machine, and options left at their defaults,
stay out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

# Options that say what was done; each is told by its flag where it was given.
TOLD = (
    "advantage_estimator", "schedule", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len",
    "rollout_temperature", "lr", "num_rollout", "num_epoch", "max_staleness", "kl_coef", "kl_loss_coef",
    "loss_type", "off_policy", "seed",
)  # fmt: skip
NAMES = ("rm_type", "custom_rm_path", "custom_agent_path", "prompt_data")


def model_card(
    config: Mapping[str, Any], summary: Mapping[str, Any], version: str, local: bool = False
) -> str:
    """The README.md, with the hub's metadata in front. `version` is the label of the weights, `local` says that the
    base is a folder of this machine."""
    base = str(config["hf_checkpoint"])
    head = ["library_name: transformers", "tags: [turnout, reinforcement-learning]"]
    if not local and base.count("/") == 1 and not base.startswith((".", "/", "~")):
        head.append(f"base_model: {base}")
    made = f"Trained from `{_name(base)}` with Turnout, {summary.get('steps', '?')} train steps."
    given = {name: config[name] for name in (*TOLD, *NAMES) if config.get(name)}
    rows = [(name, f"`{_name(value)}`" if name in NAMES else str(value)) for name, value in given.items()]
    rewards: Mapping[str, Any] = config.get("trl_rewards") or {}
    rows += [("trl_rewards", f"`{_name(path)}` x {weight}") for path, weight in rewards.items()]
    facts = [("weights, as engines and trainer attested them", f"`{version}`")]
    for name, text in (
        ("reward_first", "reward in the first step"), ("reward_last", "reward in the last step"),
        ("eval_before", "evaluation before"), ("eval_after", "evaluation after"),
        ("mismatch_mean_abs_logprob", "mean difference of log-probs, trainer to engine"),
    ):  # fmt: skip
        if isinstance(summary.get(name), int | float):
            facts.append((text, f"{summary[name]:.4g}"))
    lines = ["---", *head, "---", "", f"# {_name(base)}, trained", "", made, "", "| | |", "|---|---|"]
    lines += [f"| {text} | {value} |" for text, value in facts]
    told = [f"| `--{name.replace('_', '-')}` | {value} |" for name, value in rows]
    return "\n".join([*lines, "", "| option | value |", "|---|---|", *told, ""])


def _name(path: str) -> str:
    """A path without its folders, with what follows a colon; names of tasks and hubs as they are."""
    if path.startswith(("hub:", "reasoning_gym:")) or not path.startswith((".", "/", "~")):
        return path
    return PurePath(path).name
