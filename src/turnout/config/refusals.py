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
    **dict.fromkeys(
        (
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_tensor_parallel_size",
            "virtual_pipeline_model_parallel_size",
        ),
        (
            "this way to divide the trainer",
            "use --actor-num-gpus-per-node, --tensor-model-parallel-size and --expert-model-parallel-size",
        ),
    ),
    "release_train": ("ending the trainer between steps", "leave it out: the trainer stays resident"),
    "optimizer": ("another optimizer", "leave it out: the optimizer is AdamW"),
    "attention_dropout": ("dropout", "give 0: log-probs of engine and trainer would differ"),
    "hidden_dropout": ("dropout", "give 0: log-probs of engine and trainer would differ"),
    "opd_teacher_load": ("a teacher in the trainer", "serve it as a frozen model, named by --opd-teacher"),
    "opd_type": ("a teacher in the trainer", "leave it out: --opd-teacher is served by engines"),
    "use_routing_replay": (
        "replaying the trainer's own choice of experts",
        "use --use-rollout-routing-replay",
    ),
    **dict.fromkeys(
        ("critic_save", "critic_num_nodes", "critic_num_gpus_per_node"),
        ("a place of its own for the critic", "leave it out: it trains and is saved with the policy"),
    ),
    "only_train_params_name_list": ("training a part of the weights", "train all weights"),
    "freeze_params_name_list": ("training a part of the weights", "train all weights"),
    "buffer_filter_path": ("an own choice among requeued groups", "leave it out"),
    "data_source_path": ("an own source of prompts", "use --prompt-data"),
    "eval_function_path": ("an own evaluation function", "use --custom-rm-path in --eval-config"),
    **dict.fromkeys(
        (
            "custom_tis_function_path",
            "custom_pg_loss_reducer_function_path",
            "custom_reward_post_process_path",
            "custom_convert_samples_to_train_data_path",
            "custom_model_provider_path",
            "custom_megatron_init_path",
            "custom_megatron_before_log_prob_hook_path",
            "custom_megatron_before_train_step_hook_path",
            "custom_rollout_log_function_path",
            "custom_eval_rollout_log_function_path",
        ),
        (
            "an own function in this place",
            "leave it out; those that there are have custom or path in docs/flags.md",
        ),
    ),
    "rollout_sample_filter_path": ("an own filter of samples", "use --dynamic-sampling-filter-path"),
    "rollout_sample_hook_path": ("an own change of samples", "do it in the reward function"),
    "rollout_all_samples_process_path": ("an own look at all samples", "read the ledger"),
    "rollout_data_postprocess_path": ("an own change of batches", "leave it out"),
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
    "rollout_function_path": (
        "an own rollout function",
        "use --custom-generate-function-path, which makes one sample",
    ),
}

# Other names of what exists here, literally: on the command line they are read as such (turnout.config.slime).
RENAMED: dict[str, str] = {
    "reference_checkpoint": "--ref-load",
    "update_weight_delta_encoding": "--update-weight-encoding",
    "update_weight_delta_dir": "--update-weight-disk-dir",
    "update_weight_delta_keep_files": "--update-weight-disk-keep-files",
    "disable_grpo_std_normalization": "--no-grpo-std-normalization",
    "normalize_std": "--grpo-std-normalization",
    "calculate_per_token_loss": "--loss-aggregation token",
    "rollout_seed": "--seed",
    "learning_rate": "--lr",
    "use_tis": "--off-policy tis",
    "tis_clip": "--off-policy-clip",
    "tis_clip_low": "--off-policy-clip-low",
    "use_decoupled_loss": "--off-policy decoupled",
    "behav_imp_weight_cap": "--off-policy-clip",
    "prox_logp_method": "--prox-logp",
    "max_head_offpolicyness": "--max-staleness",
    "max_weight_staleness": "--max-staleness",
    "use_tensorboard": "--tensorboard",
    "fully_async": "--schedule async",
    "use_slime_router": "--router smg",
}

# Others, and what to write.
ELSEWHERE: dict[str, str] = {
    "prefill_num_servers": "--sglang-config with a group of prefill and one of decode",
    "eval_top_p": "top_p in the data set of --eval-config",
    "eval_top_k": "top_k in the data set of --eval-config",
    "use_critic": "--advantage-estimator ppo",
    "min_lr": "--min-lr-ratio, a share of --lr",
    "rm_url": "--custom-rm-path with a function that calls it",
    "recompute_granularity": "--gradient-checkpointing, which is `full`",
    "train_env_vars": "the environment of the command",
    "custom_config_path": "the keys of that file in the run's own YAML file",
    "dump_details": "the ledger, which `turnout inspect` reads",
    "custom_delta_pre_push_path": "--custom-update-weight-post-write-path",
    "keep_old_actor": "--off-policy decoupled, with the policy before the train step",
    "admin_token": "--admin-token-env with the name of an environment variable; a secret is never an option",
    "wandb_key": "`wandb login` or the environment variable WANDB_API_KEY; a secret is never an option",
    "wandb_host": "the environment variable WANDB_BASE_URL",
    "wandb_run_id": "nothing: it is the run's own id, also when it goes on",
    "hf_token": "the environment variable HF_TOKEN; a secret is never an option",
}

# Values that others take and that are refused here: option -> value -> (why, what to do).
_SEQ = "use seq_aux_loss"
VALUES_NOT_YET: dict[str, dict[str, tuple[str, str]]] = {
    "moe_router_load_balancing_type": {
        "aux_loss": ("counts over a micro-batch, so that the packing would change what is learned", _SEQ),
        "global_aux_loss": ("needs the counts of the whole batch before its first backward pass", _SEQ),
        "sinkhorn": ("chooses other experts than the engine's top-k", "use seq_aux_loss, or none"),
    }
}

# Mappings whose entries may be written as options of their own: prefix -> option.
ENTRIES = {"router_": "router_args", "sglang_router_": "router_args", "sglang_": "sglang_args"}


def entry_of(name: str, known: Iterable[str]) -> tuple[str, str] | None:
    """The mapping and the entry (with dashes) that a name which is no option stands for; None for the nearly right
    name of an option, and for names that are refused."""
    prefix = next((prefix for prefix in ENTRIES if name.startswith(prefix) and name != prefix), "")
    if not prefix or not_yet(name) or name in ELSEWHERE or name in RENAMED:
        return None
    if difflib.get_close_matches(name, known, n=1, cutoff=0.85):
        return None
    return ENTRIES[prefix], name.removeprefix(prefix).replace("_", "-")


def unknown_name(where: str, name: str, value: str, known: Iterable[str]) -> Fault:
    """The fault for a name that is no option. `name` has underscores; `where` is the place as it was written."""
    shown = "(not shown)" if value and _SECRET.search(name) else value
    refused = not_yet(name)
    if refused is not None:
        return Fault(where, shown, f"not yet done: {refused[0]}", refused[1])
    instead = ELSEWHERE.get(name, RENAMED.get(name))
    if instead is not None:
        return Fault(where, shown, "has another name here", f"use {instead}")
    near = difflib.get_close_matches(name, [*known, *(n for n in NOT_YET if "*" not in n)], n=3, cutoff=0.7)
    options = [candidate for candidate in near if candidate not in NOT_YET]
    if not options:
        return Fault(where, shown, "no such option", "see `turnout train --help`")
    dashed = where.startswith("--")
    names = " or ".join("--" + o.replace("_", "-") if dashed else o for o in options)
    return Fault(where, shown, "no such option", f"did you mean {names}?")


def not_yet(name: str) -> tuple[str, str] | None:
    """What a name is that is known and refused, and what to do meanwhile."""
    if name in NOT_YET:
        return NOT_YET[name]
    for pattern, explanation in NOT_YET.items():
        if pattern.endswith("*") and name.startswith(pattern[:-1]):
            return explanation
    return None
