"""What may differ between a run and its continuation: a short list; everything else must be as it was.

Pure. Promises: `differences` names every option that differs and may not, with both values, in one go; an option
that is newer than the run counts as its default.
"""

from __future__ import annotations

from typing import Any

from turnout.config.run_config import RunConfig, specs
from turnout.core.errors import Fault

MAY_DIFFER = frozenset(
    {
        # where, and how it is asked for
        *(
            "run_dir",
            "run_name",
            "resume",
            "on_resume",
            "max_wall_time",
            "run_dir_max_gb",
            "grace_s",
            "admin_token_env",
        ),
        # how many engines, ranks and threads there are, and how large the engines' caches
        *("rollout_external_engine_addrs", "rollout_external_engine_file", "rollout_engine_ca_file"),
        *("rollout_engine_api_key_env", "rollout_engine_admin_key_env"),
        "engine_expert_parallel_size",
        *("rollout_num_engines", "rollout_num_gpus_per_engine", "min_engines", "engine_threads"),
        *("sglang_config", "rollout_num_gpus", "num_gpus_per_node", "colocate"),
        *("cluster", "ray_address", "rollout_data_transport"),
        *("offload", "offload_train", "offload_rollout"),
        *("actor_num_nodes", "actor_num_gpus_per_node", "tensor_model_parallel_size"),
        "expert_model_parallel_size",
        *("trainer_threads", "engine_max_total_tokens", "engine_max_running_requests", "engine_step_tokens"),
        # deadlines
        *("engine_start_timeout_s", "rollout_health_check_interval", "rollout_health_check_timeout"),
        *(
            "rollout_health_check_first_wait",
            "use_fault_tolerance",
            "engine_restarts",
            "engine_linger",
            "update_weight_retries",
        ),
        *("train_step_timeout_s", "update_weight_timeout_s", "rollout_request_timeout_s", "reward_timeout_s"),
        "rollout_timeout_s",
        # checkpoints and seeing
        *(
            "save_interval",
            "async_save",
            "save_hf",
            "follower_expiry",
            "log_level",
            "panel",
            "tensorboard",
            "use_wandb",
            "wandb_project",
            "wandb_team",
            "wandb_group",
            "wandb_mode",
            "wandb_dir",
            "metrics_port",
            "plots",
        ),
        *("before_after_samples", "save_debug_rollout_data"),
    }
)
MAY_GROW = ("num_rollout", "num_epoch")


def differences(then: dict[str, Any], now: RunConfig) -> list[Fault]:
    """One fault for each option that keeps `now` from going on with the run whose config.json is `then`."""
    values = now.model_dump(mode="json")
    faults: list[Fault] = []
    for name, spec in specs().items():
        old, new = then.get(name, spec.default), values[name]
        if old == new or name in MAY_DIFFER:
            continue
        if name not in MAY_GROW:
            reason, remedy = f"the run in --run-dir has {_shown(old)}", "give the same, or another --run-dir"
            faults.append(Fault(spec.flag, _shown(new), reason, remedy))
        elif old is not None and new is not None and new < old:
            faults.append(
                Fault(spec.flag, str(new), f"the run has {old}, and it can only grow", f"give {old}")
            )
        elif now.lr_decay_style != "constant":
            reason = f"the run has {_shown(old)}, and its learning rate decays over that"
            faults.append(Fault(spec.flag, _shown(new), reason, f"give {_shown(old)}"))
    return faults


def grows(then: dict[str, Any], now: RunConfig) -> bool:
    """Whether the end of the run moved."""
    return any(then.get(name) != getattr(now, name) for name in MAY_GROW)


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)
