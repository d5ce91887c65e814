"""Names that are known and refused: options of features that don't exist yet, and other names of options here.

Owns the two tables and `unknown_name`, which explains any name that is no option. Promises: a name in these
tables gets its own explanation, any other name the nearest known ones; a secret's value is never shown.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from turnout.core.errors import Fault

_SECRET = re.compile(r"(^|[_-])(token|secret|password|passwd|credential|api[_-]?key)s?$")

# Name -> (what it is, what to do meanwhile). A name that ends in `*` stands for all that begin so.
NOT_YET: dict[str, tuple[str, str]] = {
    "offload": ("giving memory back between phases", "leave it out: both halves stay resident"),
    "offload_train": ("giving the trainer's memory back", "leave it out: the trainer stays resident"),
    "offload_rollout": ("giving the engines' memory back", "leave it out: the engines stay resident"),
    "sglang_*": (
        "an option of SGLang under a flag of its own",
        """give it by --sglang-args '{"NAME": VALUE}'""",
    ),
    "router_*": ("an option of a request router", "leave it out: requests go to the engines directly"),
    "use_slime_router": ("a request router", "leave it out: requests go to the engines directly"),
    "debug_rollout_only": ("rollouts without a trainer", "train for few steps, or use `turnout bench`"),
    "debug_train_only": ("training on stored rollouts", "train for few steps"),
    "rollout_external_engine_addrs": ("engines run by someone else", "let the run start its own engines"),
    "tensor_model_parallel_size": ("a trainer over several devices", "leave it out"),
    "load": (
        "starting from another run's checkpoint",
        "give the --run-dir of an interrupted run to go on with it, or its exported weights as --hf-checkpoint",
    ),
    "start_rollout_id": ("starting at a step of one's own", "a resumed run knows its step"),
    "lora_*": ("LoRA training", "train all weights, with a smaller --hf-checkpoint if memory is short"),
    "use_lora": ("LoRA training", "train all weights, with a smaller --hf-checkpoint if memory is short"),
    "speculative_*": ("speculative draft models", "leave it out: engines decode with the model itself"),
    "image_*": ("image inputs", "use text prompts"),
    "multimodal_keys": ("image inputs", "use text prompts"),
    "custom_generate_function_path": ("own generation functions", "use --custom-rm-path on one-turn prompts"),
    "rollout_function_path": ("an own rollout function", "use --custom-rm-path on one-turn prompts"),
    "entropy_coef": ("an entropy term in the loss", "leave it out"),
    "use_wandb": ("reporting to Weights & Biases", "use --tensorboard or metrics.jsonl"),
    "wandb_*": ("reporting to Weights & Biases", "use --tensorboard or metrics.jsonl"),
}

# Other names of what exists here, and what to write.
ELSEWHERE: dict[str, str] = {
    "prefill_num_servers": "--sglang-config with a group of prefill and one of decode",
    "reference_checkpoint": "--ref-load",
    "update_weight_delta_encoding": "--update-weight-encoding",
    "update_weight_delta_dir": "--update-weight-disk-dir",
    "update_weight_delta_keep_files": "--update-weight-disk-keep-files",
    "disable_grpo_std_normalization": "--no-grpo-std-normalization",
    "normalize_std": "--grpo-std-normalization",
    "calculate_per_token_loss": "--loss-aggregation token",
    "rollout_seed": "--seed",
    "learning_rate": "--lr",
    "min_lr": "--min-lr-ratio, a share of --lr",
    "micro_batch_size": "--max-tokens-per-gpu, in tokens",
    "use_dynamic_batch_size": "--max-tokens-per-gpu; batches are always packed by tokens",
    "use_tis": "--off-policy tis",
    "tis_clip": "--off-policy-clip",
    "tis_clip_low": "--off-policy-clip-low",
    "use_decoupled_loss": "--off-policy decoupled",
    "behav_imp_weight_cap": "--off-policy-clip",
    "prox_logp_method": "--prox-logp",
    "max_head_offpolicyness": "--max-staleness",
    "rm_url": "--custom-rm-path with a function that calls it",
    "use_tensorboard": "--tensorboard",
    "fully_async": "--schedule async",
    "admin_token": "--admin-token-env with the name of an environment variable; a secret is never an option",
    "hf_token": "the environment variable HF_TOKEN; a secret is never an option",
}


def unknown_name(where: str, name: str, value: str, known: Iterable[str]) -> Fault:
    """The fault for a name that is no option. `name` has underscores; `where` is the place as it was written."""
    shown = "(not shown)" if value and _SECRET.search(name) else value
    refused = _not_yet(name)
    if refused is not None:
        return Fault(where, shown, f"not yet done: {refused[0]}", refused[1])
    if name in ELSEWHERE:
        return Fault(where, shown, "has another name here", f"use {ELSEWHERE[name]}")
    near = difflib.get_close_matches(name, [*known, *(n for n in NOT_YET if "*" not in n)], n=3, cutoff=0.7)
    options = [candidate for candidate in near if candidate not in NOT_YET]
    if not options:
        return Fault(where, shown, "no such option", "see `turnout train --help`")
    dashed = where.startswith("--")
    names = " or ".join("--" + o.replace("_", "-") if dashed else o for o in options)
    return Fault(where, shown, "no such option", f"did you mean {names}?")


def _not_yet(name: str) -> tuple[str, str] | None:
    if name in NOT_YET:
        return NOT_YET[name]
    for pattern, explanation in NOT_YET.items():
        if pattern.endswith("*") and name.startswith(pattern[:-1]):
            return explanation
    return None
