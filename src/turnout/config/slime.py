"""The command line of slime, read as ours: what has another spelling, what is ignored, and with which reason.

slime (THUDM/slime) takes its own flags, all of Megatron's, and those of SGLang and its router under a prefix. Owns
the tables and the rewriting of words before they are read (turnout.config.arguments); names that are refused are in
turnout.config.refusals. Promises: nothing is ignored silently, nor where it would change what is trained: a value
that asks for something else than happens here is left for a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from turnout.config.refusals import RENAMED

SHAPE = "the model's shape is read from --hf-checkpoint"
PACKED = "batches are packed by --max-tokens-per-gpu"
SHARDED = "a trainer of several devices does this in its own way"
NO_DIMENSION = "the trainer is divided by data, tensor and expert parallel"
GOES_ON = "what --save names; a run in --run-dir goes on with it by itself"
PRECISION = "master weights, gradients and optimizer state are float32, attention's softmax as well"
ITS_OWN = "the trainer has one implementation of it"

# Flags of slime and Megatron that change nothing here, and why. All their values are passed over.
IGNORED: dict[str, str] = {
    **dict.fromkeys(
        (
            "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention",
            "num_query_groups", "kv_channels", "vocab_size", "make_vocab_size_divisible_by",
            "max_position_embeddings", "use_rotary_position_embeddings", "position_embedding_type", "rotary_base",
            "rotary_percent", "use_rope_scaling", "normalization", "norm_epsilon", "qk_layernorm", "swiglu",
            "disable_bias_linear", "add_qkv_bias", "untie_embeddings_and_output_weights", "num_experts",
            "moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq", "moe_shared_expert_intermediate_size",
            "moe_router_score_function", "moe_router_pre_softmax", "moe_router_dtype", "model_name", "spec",
        ),
        SHAPE,
    ),
    **dict.fromkeys(
        ("use_dynamic_batch_size", "micro_batch_size", "ref_micro_batch_size", "log_probs_max_tokens_per_gpu",
         "data_pad_size_multiplier", "qkv_format", "variable_seq_lengths", "seq_length"),
        PACKED,
    ),
    **dict.fromkeys(
        ("balance_data", "balance_by_flops", "sequence_parallel", "distributed_backend",
         "distributed_timeout_minutes", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather",
         "train_memory_margin_bytes", "moe_token_dispatcher_type", "moe_enable_deepep"),
        SHARDED,
    ),
    **dict.fromkeys(
        ("accumulate_allreduce_grads_in_fp32", "attention_softmax_in_fp32", "grad_reduce_in_bf16",
         "no_gradient_accumulation_fusion"),
        PRECISION,
    ),
    **dict.fromkeys(
        ("attention_backend", "moe_grouped_gemm", "moe_permute_fusion", "no_rope_fusion",
         "no_masked_softmax_fusion",
         "cross_entropy_loss_fusion", "transformer_impl", "recompute_loss_function", "log_probs_chunk_size",
         "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer"),
        ITS_OWN,
    ),
    **dict.fromkeys(
        ("recompute_method", "recompute_num_layers", "recompute_modules"), "--recompute-granularity alone decides"
    ),
    "train_backend": "there is one trainer",
    "use_mcore_models": "there is one trainer",
    "use_distributed_post": "requests go out from one process",
    "sglang_server_concurrency": "the requests of an engine are bounded by --engine-max-running-requests",
    "update_weight_delta_checksum": "every tensor and version has a blake3 digest",
    "update_weight_local_checkpoint_dir": "an engine applies deltas itself, or a follower beside it does",
    "no_save_optim": "checkpoints hold the optimizer, so that a resumed run is the same run",
    "no_load_optim": "a resumed run goes on with its optimizer",
    "no_load_rng": "a resumed run goes on with its random numbers",
    "ci_test": "the audit runs after every run",
    "disable_weights_backuper": "no copy of the weights is kept besides the store",
}  # fmt: skip

# Flags that are passed over with these values; with any other they are refused (turnout.config.refusals).
NEUTRAL: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(
        ("pipeline_model_parallel_size", "context_parallel_size", "expert_tensor_parallel_size"),
        (("1",), NO_DIMENSION),
    ),
    "optimizer": (("adam",), "the optimizer is AdamW"),
    "eval_top_p": (("1",), "evaluation samples from the whole distribution"),
    "eval_top_k": (("-1",), "evaluation samples from the whole distribution"),
    "attention_dropout": (("0",), "there is no dropout"),
    "hidden_dropout": (("0",), "there is no dropout"),
    "lora_rank": (("0",), "all weights are trained"),
    "opd_type": (("sglang",), "the teacher is served by engines"),
    "start_rollout_id": (("0",), "a new run begins there"),
    "recompute_granularity": (("selective",), "attention keeps no matrix of scores"),
}  # fmt: skip

# Values that have another name here: (option, value) -> value.
VALUES: dict[tuple[str, str], str] = {
    ("update_weight_transport", "nccl"): "group",
}
# Flags that with this value are a flag of ours.
SWITCHES: dict[tuple[str, str], str] = {("recompute_granularity", "full"): "--gradient-checkpointing"}
# Options whose value may have the name of a data set before it.
NAMED = ("eval_prompt_data",)


@dataclass
class Translated:
    """`words` are ours; `ignored` are flags that were passed over, by the reason."""

    words: list[str] = field(default_factory=list[str])
    ignored: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def told(self) -> list[str]:
        """A line for each reason."""
        return [f"ignored: {', '.join(flags)}: {reason}" for reason, flags in self.ignored.items()]


def translated(argv: Sequence[str]) -> Translated:
    """The words of a command line with slime's spellings replaced; all others stay as they are."""
    found, at = Translated(), 0
    while at < len(argv):
        end = next((i for i in range(at + 1, len(argv)) if argv[i].startswith("--")), len(argv))
        if argv[at] == "--load" and ["--save", *argv[at + 1 : end]] in _pairs(argv):
            found.ignored.setdefault(GOES_ON, []).append("--load")
        else:
            _flag(found, argv[at], list(argv[at + 1 : end]))
        at = end
    return found


def _pairs(argv: Sequence[str]) -> list[list[str]]:
    return [list(argv[at : at + 2]) for at in range(len(argv) - 1)]


def reason_to_ignore(name: str, values: Sequence[str]) -> str | None:
    """Why a flag with these values is passed over; None: it is not."""
    if name in IGNORED:
        return IGNORED[name]
    neutral, reason = NEUTRAL.get(name, ((), ""))
    return reason if len(values) == 1 and any(_same(values[0], value) for value in neutral) else None


def _flag(found: Translated, word: str, following: list[str]) -> None:
    flag, equals, given = word.partition("=")
    name = flag.removeprefix("--").replace("-", "_")
    values = [given, *following] if equals else following
    reason = reason_to_ignore(name, values) if flag.startswith("--") and "_" not in flag else None
    if reason is not None:
        found.ignored.setdefault(reason, []).append(flag)
    elif name in RENAMED and flag.startswith("--"):
        option, _, value = RENAMED[name].partition(" ")
        found.words += [f"{option}={value}"] if value else [option, *values]
    elif len(values) == 1 and (name, values[0]) in SWITCHES:
        found.words.append(SWITCHES[name, values[0]])
    elif len(values) == 1 and (name, values[0]) in VALUES:
        found.words += [flag, VALUES[name, values[0]]]
    elif name in NAMED and len(values) == 2:
        found.words += [flag, values[1]]
    else:
        found.words += [word, *following]


def _same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other
