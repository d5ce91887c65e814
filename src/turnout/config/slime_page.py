"""The page on coming from slime: `python -m turnout.config.slime_page docs/coming-from-slime.md` writes it.

Owns the list of slime's flags that people use; what becomes of each is asked of the very tables that read a command
line, so the page can't say anything else than the program does. A test compares the committed page with this.
"""

from __future__ import annotations

import sys

from turnout.config.reference import write_page
from turnout.config.refusals import ELSEWHERE, RENAMED, entry_of, not_yet
from turnout.config.run_config import specs
from turnout.config.slime import GOES_ON, IGNORED, NAMED, NEUTRAL, SWITCHES, VALUES

# By topic: flags of slime's own parser, of the two documents that this program began with, and of Megatron as
# far as slime's scripts give them.
FLAGS: dict[str, str] = {
    "Devices": """actor_num_nodes actor_num_gpus_per_node rollout_num_gpus rollout_num_gpus_per_engine
        num_gpus_per_node colocate offload offload_train offload_rollout release_train train_env_vars
        distributed_backend distributed_timeout_minutes rollout_data_transport train_backend""",
    "Engines and router": """sglang_config prefill_num_servers rollout_external_engine_addrs sglang_router_ip
        sglang_router_port sglang_router_request_timeout_secs sglang_server_concurrency sglang_mem_fraction_static
        sglang_cuda_graph_bs sglang_dp_size sglang_enable_dp_attention router_policy router_balance_abs_threshold
        use_slime_router use_distributed_post""",
    "Weight updates": """update_weight_mode update_weight_transport update_weight_encoding update_weight_disk_dir
        update_weight_disk_keep_files update_weight_buffer_size update_weights_interval update_weight_delta_encoding
        update_weight_delta_dir update_weight_delta_keep_files update_weight_delta_checksum
        update_weight_local_checkpoint_dir custom_update_weight_post_write_path custom_delta_pre_push_path
        check_weight_update_equal keep_old_actor""",
    "Faults": """use_fault_tolerance rollout_health_check_interval rollout_health_check_timeout
        rollout_health_check_first_wait""",
    "Model and checkpoints": """hf_checkpoint ref_load load save save_interval save_hf async_save no_save_optim
        no_load_optim no_load_rng start_rollout_id seed""",
    "Prompts and rollouts": """prompt_data input_key label_key metadata_key tool_key multimodal_keys
        apply_chat_template apply_chat_template_kwargs rollout_shuffle rollout_seed num_rollout num_epoch
        rollout_batch_size n_samples_per_prompt over_sampling_batch_size partial_rollout
        mask_offpolicy_in_partial_rollout rollout_max_response_len rollout_max_prompt_len rollout_max_context_len
        rollout_temperature rollout_top_p rollout_top_k rollout_stop rollout_stop_token_ids
        dynamic_sampling_filter_path buffer_filter_path rollout_function_path custom_generate_function_path
        data_source_path rollout_sample_filter_path rollout_sample_hook_path rollout_all_samples_process_path
        rollout_data_postprocess_path fully_async max_weight_staleness""",
    "Rewards": "rm_type custom_rm_path group_rm rm_url custom_reward_post_process_path",
    "Evaluation": """eval_interval eval_prompt_data eval_config skip_eval_before_train n_samples_per_eval_prompt
        eval_temperature eval_top_p eval_top_k eval_max_response_len eval_input_key eval_label_key
        eval_function_path""",
    "Algorithm": """advantage_estimator disable_grpo_std_normalization calculate_per_token_loss eps_clip
        eps_clip_high
        eps_clip_c use_kl_loss kl_loss_coef kl_loss_type kl_coef use_unbiased_kl entropy_coef use_rollout_logprobs
        use_tis tis_clip tis_clip_low use_opsm
        use_opd opd_type opd_kl_coef opd_teacher_load use_routing_replay use_rollout_routing_replay loss_type
        critic_load critic_lr critic_lr_warmup_iters num_critic_only_steps value_clip gamma lambd
        custom_loss_function_path custom_advantage_function_path custom_tis_function_path
        custom_pg_loss_reducer_function_path custom_convert_samples_to_train_data_path""",
    "Optimizer and batches": """global_batch_size num_steps_per_rollout micro_batch_size use_dynamic_batch_size
        max_tokens_per_gpu log_probs_max_tokens_per_gpu balance_data balance_by_flops optimizer lr lr_decay_style
        lr_warmup_iters min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad optimizer_cpu_offload
        overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer only_train_params_name_list
        freeze_params_name_list""",
    "Megatron: parallel and memory": """tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size
        context_parallel_size expert_model_parallel_size expert_tensor_parallel_size recompute_granularity
        recompute_method recompute_num_layers recompute_loss_function log_probs_chunk_size
        accumulate_allreduce_grads_in_fp32 attention_softmax_in_fp32 attention_backend attention_dropout
        hidden_dropout moe_token_dispatcher_type moe_enable_deepep moe_grouped_gemm moe_permute_fusion
        custom_model_provider_path custom_megatron_init_path custom_megatron_before_log_prob_hook_path
        custom_megatron_before_train_step_hook_path""",
    "Megatron: the model": """num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention
        num_query_groups kv_channels vocab_size make_vocab_size_divisible_by seq_length max_position_embeddings
        use_rotary_position_embeddings rotary_base rotary_percent normalization norm_epsilon qk_layernorm swiglu
        disable_bias_linear add_qkv_bias untie_embeddings_and_output_weights num_experts moe_ffn_hidden_size
        moe_router_topk moe_layer_freq moe_shared_expert_intermediate_size moe_router_score_function
        moe_router_pre_softmax moe_router_dtype moe_aux_loss_coeff moe_router_load_balancing_type""",
    "Looking": """use_wandb wandb_mode wandb_dir wandb_project wandb_team wandb_group wandb_key
        wandb_host wandb_run_id use_tensorboard dump_details save_debug_rollout_data
        load_debug_rollout_data debug_rollout_only debug_train_only custom_rollout_log_function_path
        custom_eval_rollout_log_function_path
        custom_config_path ci_test""",
}  # fmt: skip

# What differs where the name is the same.
NOTES: dict[str, str] = {
    "actor_num_nodes": "above 1 with `--cluster ray`",
    "actor_num_gpus_per_node": "without GPUs a device is a process",
    "update_weight_transport": "the default is `disk`",
    "update_weight_encoding": "the default is `packed`; `indices`, `deltas` and `deltas_zstd` are there too",
    "update_weight_disk_keep_files": "the two newest versions are kept without it",
    "ref_load": "a Hugging Face checkpoint; only with --use-kl-loss or --kl-coef",
    "save_debug_rollout_data": "safetensors, no pickle: docs/guides/debugging.md",
    "load_debug_rollout_data": "files of --save-debug-rollout-data, not slime's",
    "save": "checkpoints of one's own form; `--run-dir` is what a resumed run is named by",
    "save_hf": "a folder, for the last weights",
    "rollout_shuffle": "on unless `--no-rollout-shuffle`",
    "rollout_top_p": "training accepts 1 only",
    "rollout_top_k": "training accepts -1 only",
    "rm_type": "other names: docs/guides/data-and-rewards.md",
    "custom_rm_path": "called as reward(prompt, response, label, **metadata)",
    "dynamic_sampling_filter_path": "with --dynamic-sampling; called with a RolloutGroup",
    "eval_temperature": "the default is 0, greedy",
    "rollout_num_gpus_per_engine": "tensor parallel ranks; on a CPU each is a process",
    "max_tokens_per_gpu": "the default is 2048; batches are always packed",
    "rollout_health_check_interval": "the default is 1 s",
    "rollout_health_check_timeout": "the default is 5 s; three in a row count",
    "use_fault_tolerance": "a dead engine starts again at once, and joins when it has attested the weights",
    "advantage_estimator": "and others: docs/algorithms/",
    "kl_coef": "for every estimator, summed over a response; slime's baseline variant takes each token's own",
    "kl_loss_type": "the default is k3, in the reward k1",
    "custom_advantage_function_path": "called with the samples, gives their advantages",
    "custom_loss_function_path": "called as loss(terms, settings), gives each token's loss",
    "moe_router_load_balancing_type": "none and seq_aux_loss only; the default is none",
    "eps_clip": "the default follows the estimator",
    "colocate": "devices are shared; memory is given back where --offload or one of its halves is given",
    "num_rollout": "with --num-epoch as well, whichever comes first ends the run",
}

_HEAD = """# Coming from slime

Made by `python -m turnout.config.slime_page docs/coming-from-slime.md` from the tables that read the command line
(`src/turnout/config/slime.py`, `refusals.py`, `groups/`); don't edit it by hand.

`turnout train` takes the place of `python train.py`, and with `--schedule pipelined` or `async` that of
`python train_async.py`; Ray and Megatron are not needed. A command line of slime is read as it stands. Names that
mean the same are the same; some have another name here, which is understood; some change nothing here and are
passed over, with a line at the start that says so and why; the rest is refused, all at once, with what to do.
Nothing is dropped silently, and a typing error is refused with the nearest names.

```sh
turnout check --hf-checkpoint smollm2-135m --prompt-data sums.jsonl --rm-type math --num-epoch 1 ...
turnout train --hf-checkpoint smollm2-135m --prompt-data sums.jsonl --rm-type math --num-epoch 1 ...
```

- The model's shape (`--num-layers` and its kin) comes from `--hf-checkpoint`. Checkpoints need no conversion.
- `--sglang-NAME VALUE` goes to `sglang.launch_server` (with `--engine sglang`), `--router-NAME VALUE` to a router.
  Where SGLang is installed its own list of arguments is asked before anything starts.
- In YAML names are written with underscores; other spellings are understood on the command line only.
- `--eval-prompt-data NAME FILE` is read without the name; several data sets are `--eval-config`.
"""


def fate(name: str) -> str:
    """What becomes of a flag, as Markdown; raises KeyError for one that is in no table."""
    if name in specs():
        return _same(name)
    if name in RENAMED:
        return f"`{RENAMED[name]}`"
    if name in IGNORED:
        return f"ignored: {IGNORED[name]}"
    entry = entry_of(name, specs())
    refused = ELSEWHERE.get(name)
    found = not_yet(name)
    if refused is not None:
        told = f"refused: write {refused}"
    elif found is not None:
        told = f"refused, not yet done: {found[0]}. {found[1][0].upper()}{found[1][1:]}"
    elif entry is not None:
        return f"goes to {'SGLang' if entry[0] == 'sglang_args' else 'the router'}"
    else:
        raise KeyError(name)
    kept = [*(f"`{value}` is `{ours}`" for (flag, value), ours in SWITCHES.items() if flag == name)]
    if name == "load":
        kept.append(f"that of --save is ignored: {GOES_ON}")
    if name in NEUTRAL:
        values, reason = NEUTRAL[name]
        kept.append(f"`{' '.join(values)}` is ignored: {reason}")
    return "; ".join([*kept, told])


def _same(name: str) -> str:
    notes = [f"`{value}` is `{ours}`" for (option, value), ours in VALUES.items() if option == name]
    if name in NAMED:
        notes.append("a name before the file is left out")
    if name in NOTES:
        notes.append(NOTES[name])
    return "; ".join(["the same", *notes])


def names() -> list[str]:
    """All flags of the page, by YAML key."""
    return [name for group in FLAGS.values() for name in group.split()]


def render() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for topic, group in FLAGS.items():
        parts.append(f"\n## {topic}\n\n| slime | here |\n|---|---|\n")
        parts += [f"| `--{name.replace('_', '-')}` | {fate(name)} |\n" for name in group.split()]
    return "".join(parts)


def main(argv: list[str]) -> int:
    return write_page(argv, "turnout.config.slime_page docs/coming-from-slime.md", render)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
