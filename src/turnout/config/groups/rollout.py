"""Options of sampling, rewards and groups."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from turnout.config.option import PATH, Options, option


class RolloutOptions(Options):
    title: ClassVar[str] = "Rollout"

    rollout_batch_size: int = option(32, "Prompts in one rollout.", unit="prompts", ge=1)
    over_sampling_batch_size: int | None = option(
        None,
        "Prompts that are sampled for one rollout of --schedule sync or pipelined: when --rollout-batch-size "
        "groups are complete the rest is cut and dropped, counted as surplus, or kept (--partial-rollout); in "
        "pipelined it goes on until the weights change.",
        unit="prompts",
        unset="--rollout-batch-size",
        ge=1,
    )
    partial_rollout: bool = option(
        False,
        "Keep what --over-sampling-batch-size cuts: such groups go on from their tokens in the next rollout, "
        "before new prompts.",
    )
    mask_offpolicy_in_partial_rollout: bool = option(
        False, "What older weights made of a response that goes on in a later rollout carries no loss."
    )
    n_samples_per_prompt: int = option(8, "Samples of each prompt; together they are one group.", ge=1)
    rollout_max_response_len: int = option(256, "Longest response.", unit="tokens", ge=1)
    rollout_min_response_len: int = option(
        0,
        "Shortest response: the end token cannot come earlier. Equal to --rollout-max-response-len all responses "
        "have one length, as benchmarks need.",
        unit="tokens",
        ge=0,
    )
    rollout_max_context_len: int | None = option(
        None,
        "Longest prompt and response together; a response that reaches it ends as cut by length.",
        unit="tokens",
        unset="the engine's own limit",
        ge=2,
    )
    rollout_temperature: float = option(
        1.0,
        "Sampling temperature. Engine, trainer and reference all divide logits by it.",
        gt=0,
    )
    rollout_top_p: float = option(
        1.0, "Nucleus sampling. Training accepts only 1, which cuts nothing.", gt=0, le=1
    )
    rollout_top_k: int = option(
        -1, "Sampling among the k likeliest tokens. Training accepts only -1, which cuts nothing.", ge=-1
    )
    rollout_min_p: float = option(
        0.0, "Least share of the top probability. Training accepts only 0, which cuts nothing.", ge=0, lt=1
    )
    rollout_stop: list[str] = option([], "Texts that end a response.")
    rollout_stop_token_ids: list[int] = option(
        [], "Token ids that end a response, besides the model's own end token."
    )
    rollout_request_timeout_s: float = option(
        300.0, "Deadline of one generation request, with its retries.", unit="seconds", gt=0
    )
    custom_generate_function_path: str | None = option(
        None,
        "Function that makes a sample of several turns: `package.module:function` or `path/to/file.py:function`, "
        "called as await generate(episode) (docs/guides/multi-turn.md).",
        unset="a sample is one turn",
        pattern=PATH,
    )
    rollout_max_turns: int = option(
        16,
        "Most turns of the model in one sample of --custom-generate-function-path or --custom-agent-path.",
        unit="turns",
        ge=1,
    )


class RewardOptions(Options):
    title: ClassVar[str] = "Rewards and groups"

    rm_type: Literal["exact", "last_number", "f1", "math", "reasoning_gym"] | None = option(
        None, "Built-in reward by name.", unset="--custom-rm-path, or the reasoning-gym task's own"
    )
    custom_rm_path: str | None = option(
        None,
        "Reward function: `package.module.function`, `package.module:function` or `path/to/file.py:function`, "
        "called as reward(prompt, response, label, **metadata) -> float; it may be async.",
        unset="--rm-type",
        pattern=PATH,
    )
    trl_rewards: dict[str, Any] = option(
        {},
        "Reward functions written for TRL's GRPOTrainer, by their import paths, each with its weight: "
        '{"rewards.py:accuracy": 1.0, "rewards.py:format": 0.2} (docs/guides/agents.md).',
    )
    group_rm: bool = option(
        False,
        "The function of --custom-rm-path scores a whole group: rewards(prompt, responses, label, **metadata) "
        "gives a list of numbers, one for each response.",
    )
    reward_timeout_s: float = option(30.0, "Deadline of one reward.", unit="seconds", gt=0)
    group_failure_policy: Literal["drop", "survivors"] = option(
        "drop",
        "What becomes of a group of which a sample or a reward failed: drop it, or train the members that are "
        "left, with their own baseline.",
    )
    min_group_size: int = option(
        2, "Fewest members that a group of survivors may have; smaller groups are dropped.", ge=2
    )
    max_failed_groups: int = option(
        8, "Groups that one rollout may lose to failures; one more ends the run with the cause.", ge=0
    )
    dynamic_sampling: bool = option(
        False, "Drop groups whose rewards are all equal, and sample other prompts in their place."
    )
    dynamic_sampling_filter_path: str | None = option(
        None,
        "Filter of --dynamic-sampling in place of equal rewards, by import path: called with a "
        "turnout.core.types.RolloutGroup it gives True to keep it, False or the reason to drop it.",
        unset="all rewards equal",
        pattern=PATH,
    )
    dynamic_sampling_max_waves: int = option(
        4,
        "How long dynamic sampling looks for other prompts: after so many times --rollout-batch-size dropped "
        "groups the rollout ends by --on-all-filtered.",
        ge=1,
    )
    on_all_filtered: Literal["train", "best", "skip", "stop"] = option(
        "train",
        "How a rollout ends of which too much was dropped. train: what passed is trained, and the run stops where "
        "nothing did. best: dropped groups with the widest spread of rewards fill the batch. skip: another rollout "
        "begins, and the run stops after --dynamic-sampling-max-waves such in a row. stop: the run stops. Before a "
        "stop there is a checkpoint.",
    )
