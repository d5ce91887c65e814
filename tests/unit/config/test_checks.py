"""Options against each other: each refused pair names its flags, and its legal neighbours pass."""

from __future__ import annotations

import importlib.util

import pytest

from tests.unit.config.conftest import faults_of, only
from tests.unit.config.test_server_groups import MISTAKES
from turnout.config import checks, load
from turnout.config.check_weights import PAIRS
from turnout.config.checks import CHECKS
from turnout.core.errors import ConfigError

STOCK = ["--engine", "sglang"]
ROUTER = ["--sglang-router-ip", "h", "--sglang-router-port", "1"]
ASYNC = ["--schedule", "async"]
GROUP_RM = ["--no-rm-type", "--custom-rm-path", "a:b", "--group-rm"]
EVAL = ["--eval-prompt-data", "held.jsonl"]
AGENT = ["--custom-agent-path", "a:b", "--rollout-max-context-len", "1024"]

RLOO = ["--advantage-estimator", "rloo"]
LOADED = ["--load-debug-rollout-data", "quick.yaml"]
SAVED = ["--num-rollout", "1", "--save-debug-rollout-data", "quick.yaml"]

DELTA = ["--update-weight-mode", "delta"]
ONE_BATCH = ["--num-rollout", "1", "--save-debug-rollout-data"]

EXTERNAL = ["--rollout-external-engine-addrs", "h:1"]
RAY_RANKS = ["--cluster", "ray", "--actor-num-gpus-per-node", "2"]
FOLLOWED = ["--update-weight-transport", "follower", *EXTERNAL]

PPO = ["--advantage-estimator", "ppo"]
SFT = ["--loss-type", "sft_loss", "--n-samples-per-prompt", "1"]
OPD = ["--use-opd", "--opd-teacher", "wise"]

REFUSED = [
    (["--wandb-project", "x"], "--wandb-project", "give --use-wandb"),
    (["--use-opd"], "--use-opd", "give --opd-teacher"),
    (["--opd-teacher", "wise"], "--opd-teacher", "give --use-opd"),
    ([*OPD, "--rollout-temperature", "0.7"], "--rollout-temperature", "give 1"),
    ([*OPD, "--no-rm-type", "--dynamic-sampling"], "--dynamic-sampling", "without rewards all members"),
    ([*SFT, "--schedule", "pipelined"], "--schedule", "samples none"),
    (["--loss-type", "sft_loss"], "--n-samples-per-prompt", "give 1"),
    ([*SFT, "--prompt-data", "reasoning_gym:x"], "--prompt-data", "shows no answers"),
    ([*SFT, "--debug-rollout-only"], "--debug-rollout-only", "samples none"),
    ([*SFT, "--router", "smg"], "--router", "has no engines"),
    ([*SFT, *EXTERNAL], "--rollout-external-engine-addrs", "has no engines"),
    ([*SFT, "--rollout-external-engine-file", "quick.yaml"], "--rollout-external-engine-file", "no engines"),
    ([*SFT, "--update-weight-mode", "delta"], "--update-weight-mode", "has no engines"),
    ([*SFT, "--no-rm-type", *EVAL], "--eval-prompt-data", "give a reward"),
    (["--critic-lr", "1e-5"], "--critic-lr", "the run has no critic"),
    (["--lambd", "0.9"], "--lambd", "give --advantage-estimator ppo"),
    ([*PPO, "--critic-load", "no/such/folder"], "--critic-load", "no such"),
    ([*PPO, "--critic-lr-warmup-iters", "9", "--num-rollout", "9"], "--critic-lr-warmup-iters", "at most 8"),
    ([*PPO, "--num-critic-only-steps", "10"], "--num-critic-only-steps", "give at most 9"),
    (
        [*PPO, "--num-critic-only-steps", "4", "--lr-warmup-iters", "6"],
        "--lr-warmup-iters",
        "the policy has only 6 optimizer steps",
    ),
    ([*EXTERNAL, "::1:80"], "--rollout-external-engine-addrs", "write host:port"),
    ([*EXTERNAL, "http://h:1/v1"], "--rollout-external-engine-addrs", "has no path"),
    ([*EXTERNAL, "https://H:1/"], "--rollout-external-engine-addrs", "the engine of h:1 again"),
    (
        ["--rollout-external-engine-addrs", "[::1]:1", "[0:0::1]:1"],
        "--rollout-external-engine-addrs",
        "again",
    ),
    ([*EXTERNAL, *STOCK], "--engine", "what they were started as"),
    ([*EXTERNAL, "--rollout-num-engines", "2"], "--rollout-num-engines", "what they were started as"),
    ([*EXTERNAL, "--admin-token-env", "X"], "--admin-token-env", "what they were started as"),
    ([*EXTERNAL, "--update-weight-transport", "tensor"], "--update-weight-transport", "not on this host"),
    ([*EXTERNAL, "--rollout-engine-ca-file", "x"], "--rollout-engine-ca-file", "no such file"),
    ([*EXTERNAL, "--rollout-engine-ca-file", __file__], "--rollout-engine-ca-file", "by https"),
    ([*EXTERNAL, "--min-engines", "2"], "--min-engines", "the run has 1 engines"),
    (["--rollout-external-engine-file", "no/such"], "--rollout-external-engine-file", "no such file"),
    (["--rollout-engine-api-key-env", "X"], "--rollout-engine-api-key-env", "starts its own engines"),
    ([*STOCK, "--engine-linger", "5"], "--engine-linger", "an SGLang ends with the controller"),
    (["--ray-address", "10.0.0.1:6379"], "--ray-address", "give --cluster ray"),
    (["--cluster", "ray", "--engine-linger", "5"], "--engine-linger", "an engine ends with its actor"),
    (["--rollout-data-transport", "nixl"], "--rollout-data-transport", "nixl is not installed"),
    (
        ["--rollout-data-transport", "object-store"],
        "--rollout-data-transport",
        "give --cluster ray",
    ),
    (["--cluster", "ray", *STOCK], "--cluster", "not yet done: SGLang on GPUs"),
    (
        ["--cluster", "ray", "--update-weight-transport", "tensor"],
        "--update-weight-transport",
        "lie on another node",
    ),
    (["--cluster", "ray", "--colocate"], "--cluster", "are on its machine"),
    (["--cluster", "ray", "--rollout-external-engine-addrs", "h:1"], "--cluster", "somebody else put them"),
    (["--engine-restarts", "2"], "--engine-restarts", "give --use-fault-tolerance"),
    (["--sglang-device", "cpu"], "--sglang-device", "give --engine sglang"),
    (["--router", "direct", "--router-policy", "random"], "--router-policy", "the run starts no router"),
    (["--router", "smg", "--router-port", "1"], "--router-args", "a free port is chosen"),
    ([*ROUTER, "--router-log-level", "info"], "--router-args", "has its own"),
    (["--sglang-router-ip", "h"], "--sglang-router-port", "give both"),
    ([*ROUTER, "--router", "direct"], "--sglang-router-ip", "asks no router"),
    (
        [*STOCK, "--router", "smg", "--schedule", "async", "--max-engine-lag", "1"],
        "--max-engine-lag",
        "a router mixes",
    ),
    (["--update-weight-transport", "checkpoint-engine"], "--update-weight-transport", "only SGLang has"),
    (["--sglang-python", "p"], "--sglang-python", "give --engine sglang"),
    (["--sglang-args", '{"a": 1}'], "--sglang-args", "give --engine sglang"),
    ([*STOCK, "--engine-row-block", "32"], "--engine-row-block", "SGLang chooses"),
    ([*STOCK, "--engine-max-total-tokens", "9999"], "--engine-max-total-tokens", "SGLang chooses"),
    ([*STOCK, "--sglang-args", '{"dtype": "float32"}'], "--sglang-args", "give --dtype"),
    ([*STOCK, "--sglang-args", '{"api_key": "x"}'], "--sglang-args", "give --admin-token-env"),
    ([*STOCK, "--sglang-args", '{"base_gpu_id": 0}'], "--sglang-args", "devices are laid out"),
    ([*STOCK, "--sglang-args", '{"gpu-id-step": 2}'], "--sglang-args", "devices are laid out"),
    ([*STOCK, "--sglang-args", '{"nnodes": 2}'], "--sglang-args", "on one machine"),
    ([*STOCK, "--sglang-args", '{"node-rank": 1}'], "--sglang-args", "on one machine"),
    ([*STOCK, "--sglang-args", '{"--mem-fraction-static": 0.5}'], "--sglang-args", "without dashes"),
    ([*STOCK, "--sglang-args", '{"tp-size": 2}'], "--sglang-args", "several ranks"),
    (
        [*STOCK, "--sglang-python", "env/bin/python", "--sglang-args", '{"mem-fracton-static": 0.8}'],
        "--sglang-args",
        "did you mean mem-fraction-static?",
    ),
    (
        [*STOCK, "--deterministic", "--engine-threads", "1", "--trainer-threads", "1"],
        "--deterministic",
        "more than the seed",
    ),
    (["--max-lead", "2"], "--max-lead", "the lead of the sync schedule is fixed"),
    (["--partial-rollout"], "--partial-rollout", "no group is cut without more groups in flight"),
    (["--mask-offpolicy-in-partial-rollout"], "--mask-offpolicy-in-partial-rollout", "no response goes on"),
    (["--on-weight-update", "abort"], "--on-weight-update", "the sync schedule changes weights when nothing"),
    ([*ASYNC, *STOCK, "--on-weight-update", "continue"], "--on-weight-update", "SGLang does not say"),
    (
        [
            *ASYNC,
            "--deterministic",
            "--on-weight-update",
            "retract",
            "--engine-threads",
            "1",
            "--trainer-threads",
            "1",
        ],
        "--on-weight-update",
        "depends on more than the seed",
    ),
    ([*ASYNC, "--mask-kv-mixed"], "--mask-kv-mixed", "--on-weight-update retract"),
    (
        [
            *ASYNC,
            "--deterministic",
            "--engine-threads",
            "1",
            "--trainer-threads",
            "1",
            "--rollout-window",
            "2",
        ],
        "--rollout-window",
        "--deterministic trains groups strictly in order",
    ),
    (
        ["--deterministic", "--engine-threads", "1", "--trainer-threads", "1", "--kv-high-watermark", "0.9"],
        "--kv-high-watermark",
        "depends on time",
    ),
    (
        [*ASYNC, "--max-lead", "0", "--rollout-window", "2"],
        "--max-lead",
        "31 slots cannot hold the 32 groups from one version to the next",
    ),
    ([*ASYNC, "--rollout-slots", "200"], "--rollout-slots", "lets rollouts lead by 6 steps, --max-lead is 2"),
    (
        ["--update-weights-interval", "4"],
        "--update-weights-interval",
        "--schedule sync makes tokens of lag 3, --max-staleness is 2",
    ),
    (
        ["--schedule", "pipelined", "--max-staleness", "0"],
        "--max-staleness",
        "--schedule pipelined makes tokens of lag 1, --max-staleness is 0",
    ),
    (["--rollout-timeout-s", "330"], "--rollout-timeout-s", "one sample may take 330 s"),
    (
        ["--update-weight-mode", "delta", "--update-weight-transport", "tensor"],
        "--update-weight-mode",
        "use --update-weight-transport disk or group or follower with delta, or",
    ),
    (
        ["--update-weight-disk-dir", "ftp://host/a"],
        "--update-weight-disk-dir",
        "no object store that is known",
    ),
    (
        ["--engine", "sglang", "--custom-update-weight-pre-read-path", "hooks.read"],
        "--custom-update-weight-pre-read-path",
        "calls no hook",
    ),
    (
        ["--custom-update-weight-post-write-path", "hook.py:"],
        "--custom-update-weight-post-write-path",
        "names no function",
    ),
    (["--update-weight-encoding", "packed"], "--update-weight-encoding", "full versions hold"),
    (
        [
            "--update-weight-mode",
            "delta",
            "--update-weight-transport",
            "group",
            "--update-weight-encoding",
            "xor",
        ],
        "--update-weight-encoding",
        "a group carries positions and values",
    ),
    (
        ["--engine-quantization", "int8", "--update-weight-mode", "delta"],
        "--engine-quantization",
        "does not hold the state",
    ),
    (
        ["--engine-quantization", "fp8", "--rollout-num-gpus-per-engine", "2"],
        "--engine-quantization",
        "several ranks",
    ),
    (
        ["--engine-expert-parallel-size", "3", "--rollout-num-gpus-per-engine", "4"],
        "--engine-expert-parallel-size",
        "does not divide --rollout-num-gpus-per-engine 4",
    ),
    ([*STOCK, "--update-weight-mode", "delta"], "--update-weight-mode", "a stock SGLang applies no deltas"),
    ([*STOCK, "--rollout-num-gpus-per-engine", "2"], "--rollout-num-gpus-per-engine", "several ranks"),
    (["--rollout-num-gpus", "0"], "--rollout-num-gpus", "nothing is sampled"),
    (["--rollout-num-gpus", "-1"], "--rollout-num-gpus", "at least 0"),
    (
        ["--rollout-num-gpus", "6", "--rollout-num-gpus-per-engine", "4"],
        "--rollout-num-gpus",
        "per engine fit: 1, 2, 3, 6",
    ),
    (["--rollout-num-gpus", "3", "--rollout-num-engines", "2"], "--rollout-num-gpus", "leave one of the two"),
    (
        ["--colocate", "--rollout-num-gpus-per-engine", "2"],
        "--rollout-num-gpus-per-engine",
        "--colocate gives",
    ),
    (["--offload", *ASYNC], "--offload", "use --schedule sync, for long samples with --partial-rollout"),
    (["--offload-rollout", "--schedule", "pipelined"], "--offload-rollout", "both halves stay in memory"),
    (["--offload-train", "--update-weights-interval", "2"], "--offload-train", "--update-weights-interval 1"),
    (
        ["--offload", "--update-weight-mode", "delta"],
        "--update-weight-mode",
        "full, or --offload-train alone",
    ),
    (["--offload-rollout", *EXTERNAL], "--offload-rollout", "--offload-train alone"),
    (["--offload", "--debug-rollout-only"], "--offload", "leave it out, or --debug-rollout-only"),
    ([*SFT, "--offload"], "--offload", "leave it out, or give --eval"),
    ([*SFT, "--offload-train"], "--offload-train", "leave it out, or give --eval"),
    (
        ["--offload-train", "--async-save", "--save-interval", "2"],
        "--async-save",
        "leave it out, or --offload-train",
    ),
    (["--offload-rollout", "--cluster", "ray"], "--offload-rollout", "give --cluster local, or give"),
    (["--offload", *STOCK, "--colocate"], "--offload", "use --engine embedded, or give --offload-train"),
    (["--actor-num-nodes", "2"], "--actor-num-nodes", "give --cluster ray"),
    ([*RAY_RANKS, "--num-gpus-per-node", "1"], "--num-gpus-per-node", "lie on one: 2"),
    ([*RAY_RANKS, "--rollout-data-transport", "local"], "--rollout-data-transport", "on another node"),
    ([*RAY_RANKS, "--offload-train"], "--offload-train", "which the nodes of the cluster share"),
    (["--cluster", "ray", *LOADED], "--cluster", "on saved batches alone"),
    (
        ["--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "3"],
        "--tensor-model-parallel-size",
        "does not divide the 4 devices of the trainer",
    ),
    (
        ["--actor-num-gpus-per-node", "4", "--expert-model-parallel-size", "3"],
        "--expert-model-parallel-size",
        "does not divide the 4 devices of the trainer -> fit: 1, 2, 4",
    ),
    (
        ["--num-gpus-per-node", "2", "--rollout-num-engines", "2"],
        "--num-gpus-per-node",
        "3 devices are needed",
    ),
    (["--sglang-config", "none.yaml"], "--sglang-config", "no such file"),
    (["--min-engines", "2"], "--min-engines", "the run has 1 engines"),
    ([*FOLLOWED[:2], "--schedule", "async"], "--update-weight-transport", "no follower beside them"),
    (FOLLOWED, "--update-weight-transport", "for its follower to say"),
    (
        [*FOLLOWED, "--schedule", "async", "--on-weight-update", "abort"],
        "--on-weight-update",
        "a follower has",
    ),
    (
        [*FOLLOWED, "--schedule", "async", "--check-weight-update-equal"],
        "--check-weight-update-equal",
        "prove their live weights anyway",
    ),
    (["--max-engine-lag", "1"], "--max-engine-lag", "the sync schedule asks no engine that is behind"),
    (["--no-num-rollout"], "--num-rollout", "no end"),
    (["--global-batch-size", "7"], "--global-batch-size", "= 256 samples"),
    (["--num-steps-per-rollout", "3"], "--num-steps-per-rollout", "= 256 samples"),
    (["--global-batch-size", "64", "--num-steps-per-rollout", "2"], "--global-batch-size", "is not"),
    (["--n-samples-per-prompt", "1"], "--n-samples-per-prompt", "every advantage is 0"),
    ([*RLOO, "--grpo-std-normalization"], "--grpo-std-normalization", "rloo has no standard deviation"),
    ([*RLOO, "--gamma", "0.9"], "--gamma", "the same advantage"),
    (["--advantage-estimator", "cispo", "--eps-clip-c", "6"], "--eps-clip-c", "cispo bounds the ratio"),
    (["--custom-loss-function-path", "none.py:f"], "--custom-loss-function-path", "no file none.py"),
    (
        ["--advantage-estimator", "ppo", "--custom-advantage-function-path", "a.b"],
        "--custom-advantage-function-path",
        "the critic of ppo",
    ),
    (["--eps-clip-c", "1.1"], "--eps-clip-c", "clipped at 1 + 0.2 already"),
    (["--opsm-delta", "0.1"], "--opsm-delta", "give --use-opsm"),
    (["--overlong-penalty-factor", "0.5"], "--overlong-penalty-factor", "give --overlong-buffer-len"),
    (["--overlong-buffer-len", "256"], "--overlong-buffer-len", "at most --rollout-max-response-len 256"),
    (["--use-unbiased-kl"], "--use-unbiased-kl", "give --use-kl-loss"),
    (["--kl-coef", "0.1", "--use-kl-loss", "--kl-loss-coef", "0.1"], "--kl-coef", "in the loss already"),
    (["--group-failure-policy", "survivors", "--min-group-size", "9"], "--min-group-size", "only"),
    (["--rollout-top-p", "0.9"], "--rollout-top-p", "whole distribution"),
    (["--rollout-top-k", "50"], "--rollout-top-k", "whole distribution"),
    (["--rollout-min-p", "0.1"], "--rollout-min-p", "whole distribution"),
    (["--rollout-temperature", "0"], "--rollout-temperature", "greater than 0"),
    (["--rollout-temperature", "-1"], "--rollout-temperature", "greater than 0"),
    (["--rollout-temperature", "nan"], "--rollout-temperature", "finite"),
    (
        ["--rollout-max-context-len", "1024", "--rollout-max-prompt-len", "1024"],
        "--rollout-max-prompt-len",
        "passes --rollout-max-context-len 1024 by 256 tokens",
    ),
    (["--rollout-min-response-len", "257"], "--rollout-min-response-len", "longer than"),
    (["--max-tokens-per-gpu", "256"], "--max-tokens-per-gpu", "257 tokens"),
    (["--engine-max-total-tokens", "200"], "--engine-max-total-tokens", "257 tokens"),
    (["--engine-step-tokens", "63"], "--engine-step-tokens", "decodes one token a step"),
    (["--custom-rm-path", "a.b"], "--custom-rm-path", "two rewards"),
    (["--no-rm-type"], "--rm-type", "no reward"),
    (["--group-rm"], "--group-rm", "no built-in reward"),
    ([*GROUP_RM, "--group-failure-policy", "survivors"], "--group-failure-policy", "survivors are not all"),
    (AGENT[:2], "--rollout-max-context-len", "the agent a:b writes its own context"),
    (["--prompt-data", "verifiers:x"], "--rollout-max-context-len", "verifiers_env:agent writes its own"),
    ([*AGENT, "--custom-generate-function-path", "a:b"], "--custom-generate-function-path", "two makers"),
    ([*SFT, *AGENT], "--custom-agent-path", "samples none"),
    (["--trl-rewards", '{"a:b": 1}'], "--trl-rewards", "two rewards: --rm-type exact"),
    (["--no-rm-type", "--trl-rewards", '{"a:b": "1"}'], "--trl-rewards", "the weight is no number"),
    (["--no-rm-type", "--trl-rewards", '{"no/such.py:b": 1}'], "--trl-rewards", "no file no/such.py"),
    ([*SFT, "--no-rm-type", "--trl-rewards", '{"a:b": 1}'], "--trl-rewards", "have no reward"),
    ([*GROUP_RM, *EVAL], "--eval-prompt-data", "scores single responses"),
    (["--dynamic-sampling-filter-path", "a:b"], "--dynamic-sampling-filter-path", "nothing is filtered"),
    (["--on-all-filtered", "best"], "--on-all-filtered", "nothing is filtered"),
    (
        ["--over-sampling-batch-size", "31"],
        "--over-sampling-batch-size",
        "fewer than --rollout-batch-size 32",
    ),
    (
        ["--over-sampling-batch-size", "48", "--schedule", "async"],
        "--over-sampling-batch-size",
        "the slots are",
    ),
    (
        [
            "--over-sampling-batch-size",
            "48",
            "--deterministic",
            "--engine-threads",
            "1",
            "--trainer-threads",
            "1",
        ],
        "--over-sampling-batch-size",
        "depends on the clock",
    ),
    (["--no-rm-type", "--custom-rm-path", "reward"], "--custom-rm-path", "names no function"),
    (["--no-rm-type", "--custom-rm-path", "a-b.c"], "--custom-rm-path", "names no function"),
    (["--no-rm-type", "--custom-rm-path", "none.py:f"], "--custom-rm-path", "no file none.py"),
    (["--eval-interval", "5"], "--eval-interval", "nothing to evaluate"),
    (["--eval-mode", "checkpoint"], "--eval-mode", "nothing to evaluate"),
    ([*EVAL, "--eval-mode", "dedicated"], "--eval-mode", "give --eval-model"),
    ([*EVAL, "--eval-model", "eval"], "--eval-model", "give --eval-mode dedicated"),
    (["--ref-model", "ref", "--use-kl-loss", "--ref-load", "m"], "--ref-model", "leave one of the two out"),
    (["--ref-model", "ref"], "--ref-model", "give --use-kl-loss"),
    (
        ["--ref-model", "ref", "--use-kl-loss", "--rollout-temperature", "0.7"],
        "--ref-model",
        "engines score a prompt at temperature 1",
    ),
    (
        [*EVAL, "--eval-mode", "checkpoint", "--update-weight-transport", "group"],
        "--eval-mode",
        "no version stays on disk",
    ),
    ([*EVAL, "--eval-config", "quick.yaml"], "--eval-prompt-data", "names the data sets"),
    (["--eval-config", "quick.yaml", "--eval-sampled"], "--eval-sampled", "names the data sets"),
    (["--eval-config", "none.yaml"], "--eval-config", "no such file"),
    (["--eval-num-prompts", "5"], "--eval-num-prompts", "nothing to evaluate"),
    ([*EVAL, "--n-samples-per-eval-prompt", "4"], "--n-samples-per-eval-prompt", "equal"),
    (["--eval-prompt-data", "train.jsonl"], "--eval-prompt-data", "no held-out"),
    (["--kl-loss-coef", "0.1"], "--kl-loss-coef", "no KL term"),
    (
        ["--moe-aux-loss-coeff", "0.1"],
        "--moe-aux-loss-coeff",
        "give --moe-router-load-balancing-type seq_aux_loss",
    ),
    (
        ["--moe-router-load-balancing-type", "aux_loss"],
        "--moe-router-load-balancing-type",
        "the packing would change",
    ),
    (
        ["--moe-router-load-balancing-type", "global_aux_loss"],
        "--moe-router-load-balancing-type",
        "counts of the whole batch",
    ),
    (
        ["--moe-router-load-balancing-type", "sinkhorn"],
        "--moe-router-load-balancing-type",
        "use seq_aux_loss, or none",
    ),
    (["--ref-load", "model"], "--ref-load", "nothing uses"),
    (["--min-lr-ratio", "0.1"], "--min-lr-ratio", "no end value"),
    (
        ["--lr-decay-style", "cosine", "--no-num-rollout", "--num-epoch", "1"],
        "--lr-decay-style",
        "number of steps",
    ),
    (["--lr-warmup-iters", "10"], "--lr-warmup-iters", "only 10 optimizer steps"),
    (["--deterministic", "--trainer-threads", "1"], "--engine-threads", "one thread"),
    (
        ["--deterministic", "--engine-threads", "1", "--trainer-threads", "2"],
        "--trainer-threads",
        "one thread",
    ),
    (["--min-unmasked-share", "0.2"], "--min-unmasked-share", "give --staleness-policy mask"),
    (["--off-policy-clip", "3"], "--off-policy-clip", "no weight to bound"),
    (["--off-policy-clip-low", "0.1"], "--off-policy-clip-low", "no weight to bound"),
    (["--off-policy", "tis", "--off-policy-clip", "1"], "--off-policy-clip", "greater than 1"),
    (["--off-policy", "tis", "--use-rollout-logprobs"], "--use-rollout-logprobs", "a correction already"),
    (["--off-policy", "tis", "--prox-logp", "interpolate"], "--prox-logp", "no proximal policy"),
    (["--hf-checkpoint", "/nowhere"], "--hf-checkpoint", "no such folder"),
    (["--hf-checkpoint", "./nowhere"], "--hf-checkpoint", "no such folder"),
    (["--hf-checkpoint", "train.jsonl"], "--hf-checkpoint", "is a file"),
    (["--use-kl-loss", "--ref-load", "./nowhere"], "--ref-load", "no such folder"),
    (["--hf-checkpoint", "empty"], "--hf-checkpoint", "no config.json"),
    (["--prompt-data", "none.jsonl"], "--prompt-data", "no such file"),
    (["--prompt-data", "s3://x/y.jsonl"], "--prompt-data", "no such file"),
    (["--prompt-data", "x" * 5000], "--prompt-data", "no such file"),
    (["--hf-checkpoint", "~nobody-of-this-name/x"], "--hf-checkpoint", "no such folder"),
    (["--prompt-data", "model"], "--prompt-data", "is a folder, and no data set of save_to_disk"),
    (["--prompt-data", "quick.yaml"], "--prompt-data", "files of this kind"),
    (["--eval-prompt-data", "none.jsonl"], "--eval-prompt-data", "no such file"),
    (["--save", "out", "--save-hf", "./x/../out/"], "--save-hf", "the same place as --save"),
    (["--save", "model"], "--save", "the same place as --hf-checkpoint"),
    (["--run-dir", "train.jsonl/../out", "--save", "out"], "--save", "the same place as --run-dir"),
    (["--save", "quick.yaml"], "--save", "no folder"),
    (["--async-save", "--save", "out"], "--async-save", "nothing is saved beside"),
    (
        [*SAVED, "--load-debug-rollout-data", "./model/../quick.yaml"],
        "--save-debug-rollout-data",
        "the same place as",
    ),
    (["--save-debug-rollout-data", "one.st"], "--save-debug-rollout-data", "would replace the file"),
    (["--save-debug-rollout-data", "{step}_{rollout_id}"], "--save-debug-rollout-data", "{step} stands for"),
    (["--load-debug-rollout-data", "{rollout_id}.st"], "--load-debug-rollout-data", "there is no 0.st"),
    (["--load-debug-rollout-data", "model"], "--load-debug-rollout-data", "holds no batch.safetensors"),
    (["--debug-train-only"], "--debug-train-only", "nothing to train on"),
    ([*LOADED, "--save", "out"], "--save", "give --save-hf"),
    ([*LOADED, "--save-interval", "2"], "--save-interval", "give --save-hf"),
    ([*LOADED, "--offload"], "--offload", "leave it out"),
    ([*LOADED, "--offload-train"], "--offload-train", "leave it out"),
    ([*LOADED, "--offload-rollout"], "--offload-rollout", "leave it out"),
    (
        ["--load-debug-rollout-data", "quick.yaml", "--debug-rollout-only"],
        "--debug-rollout-only",
        "the other half",
    ),
    (["--save", ""], "--save", "empty"),
    (["--run-dir", "out", "--ledger-dir", "./out"], "--ledger-dir", "the same place as --run-dir"),
    (["--ledger-dir", "quick.yaml"], "--ledger-dir", "no folder"),
    (
        ["--schedule", "async", "--update-weights-interval", "2", "--save-interval", "3"],
        "--save-interval",
        "multiple of 2",
    ),
    (["--run-dir", "old"], "--run-dir", "it has no run.json"),
    (["--run-dir", "begun", "--resume", "never"], "--run-dir", "holds a run already"),
    (["--resume", "must"], "--resume", "there is no run to go on with"),
    (["--run-dir", "new", "--resume", "must"], "--resume", "there is no run to go on with in new"),
]

ACCEPTED = [
    [*RAY_RANKS, "--actor-num-nodes", "2", "--num-gpus-per-node", "2", "--rollout-num-engines", "9"],
    [*RAY_RANKS, *EXTERNAL],
    [*EXTERNAL, "--num-gpus-per-node", "1"],
    [*EXTERNAL, "--num-gpus-per-node", "1", "--debug-rollout-only"],
    ["--cluster", "ray", *STOCK, "--sglang-device", "cpu", "--update-weight-transport", "group"],
    ["--num-gpus-per-node", "1", "--debug-rollout-only"],
    ["--num-gpus-per-node", "1", "--rollout-num-engines", "2", "--load-debug-rollout-data", "quick.yaml"],
    [],
    ["--colocate", "--rollout-num-gpus", "2", "--num-gpus-per-node", "2"],
    ["--colocate", *ASYNC],
    ["--colocate", "--offload"],
    ["--offload", "--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2"],
    ["--offload-train"],
    [*PPO, "--actor-num-gpus-per-node", "2"],
    ["--offload-rollout", "--update-weight-transport", "group"],
    ["--offload-train", "--update-weight-mode", "delta"],
    ["--offload", "--partial-rollout", "--over-sampling-batch-size", "64"],
    ["--offload-train", *STOCK],
    ["--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2", "--rollout-num-engines", "2"],
    ["--global-batch-size", "64"],
    ["--num-steps-per-rollout", "4"],
    ["--global-batch-size", "64", "--num-steps-per-rollout", "4"],
    ["--num-epoch", "2"],
    ["--no-num-rollout", "--num-epoch", "2"],
    ["--rollout-max-response-len", "1024"],
    ["--rollout-max-context-len", "1024"],
    ["--rollout-max-context-len", "100"],
    ["--rollout-max-context-len", "1280", "--rollout-max-prompt-len", "1024"],
    ["--group-failure-policy", "survivors", "--min-group-size", "8"],
    ["--min-group-size", "9"],
    ["--no-rm-type", "--custom-rm-path", "package.module:reward"],
    ["--no-rm-type", "--custom-rm-path", "package.module.reward"],
    ["--no-rm-type", "--prompt-data", 'reasoning_gym:chain_sum:{"size": 5}'],
    ["--prompt-data", "train.jsonl@[0:1]"],
    [*EVAL, "--eval-interval", "5"],
    GROUP_RM,
    AGENT,
    [*AGENT, "--no-rm-type"],
    ["--no-rm-type", "--trl-rewards", '{"a:b": 1, "a:c": 0.5}', "--group-rm"],
    ["--dynamic-sampling", "--dynamic-sampling-filter-path", "a:b", "--on-all-filtered", "skip"],
    ["--over-sampling-batch-size", "32"],
    ["--over-sampling-batch-size", "33"],
    ["--over-sampling-batch-size", "48", "--schedule", "pipelined", "--partial-rollout"],
    [*EVAL, "--eval-temperature", "1", "--n-samples-per-eval-prompt", "4"],
    [*EVAL, "--eval-num-prompts", "5"],
    [*EVAL, "--eval-mode", "checkpoint", "--update-weight-mode", "delta"],
    ["--eval-config", "quick.yaml", "--eval-interval", "5"],
    ["--use-kl-loss"],
    ["--kl-coef", "0.1", "--use-kl-loss"],
    ["--custom-advantage-function-path", "a.b", "--n-samples-per-prompt", "1"],
    ["--advantage-estimator", "reinforce_plus_plus", "--n-samples-per-prompt", "1", "--gamma", "0.9"],
    ["--use-opsm", "--opsm-delta", "0.1", "--overlong-buffer-len", "255", "--eps-clip-c", "3"],
    ["--use-rollout-logprobs"],
    ["--off-policy", "mis", "--off-policy-clip", "4", "--off-policy-clip-low", "0.25"],
    ["--off-policy", "decoupled", "--prox-logp", "interpolate"],
    ["--staleness-policy", "mask", "--min-unmasked-share", "0.2"],
    ["--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load", "model"],
    [*PPO, "--num-critic-only-steps", "9", "--lr-decay-style", "cosine", "--critic-lr-warmup-iters", "9"],
    ["--lr-decay-style", "linear", "--lr-warmup-iters", "9", "--min-lr-ratio", "0.1"],
    ["--deterministic", "--engine-threads", "1", "--trainer-threads", "1"],
    STOCK,
    [*STOCK, "--sglang-device", "cpu", "--engine-max-total-tokens", "9999", "--sglang-python", "p"],
    [*STOCK, "--sglang-args", '{"mem-fraction-static": 0.8, "enable_metrics": true, "tp-size": 1}'],
    ["--save", "ck", "--save-interval", "2", "--save-hf", "hf", "--run-dir", "out"],
    ["--hf-checkpoint", "org/model-name"],
    ["--hf-checkpoint", "smollm2-135m"],
    ["--run-dir", "empty"],
    ["--update-weight-transport", "group", "--save-hf", "out"],
    [
        "--update-weight-mode",
        "delta",
        "--update-weight-encoding",
        "xor",
        "--rollout-num-gpus-per-engine",
        "2",
    ],
    *(
        ["--update-weight-mode", mode, "--update-weight-transport", transport]
        for (mode, transport), reason in PAIRS.items()
        if reason is None and transport not in ("checkpoint-engine", "follower")
    ),
]


@pytest.fixture
def places(folder):
    (folder / "begun").mkdir()
    (folder / "begun" / "run.json").write_text("{}")
    (folder / "old").mkdir()
    (folder / "old" / "events.jsonl").write_text("")
    (folder / "empty").mkdir()


@pytest.mark.parametrize(
    ("argv", "flag", "said"), REFUSED, ids=lambda v: " ".join(v) if isinstance(v, list) else ""
)
def test_refused(write, places, argv, flag, said):
    fault = only(write(), argv)
    assert fault.where.split(" ")[0] == flag
    assert said in fault.reason or said in fault.line()
    assert fault.remedy or "finite" in said, "a fault without a remedy"


IPC = ["--update-weight-transport", "checkpoint-engine"]


@pytest.mark.parametrize(
    ("argv", "has_zmq", "reasons"),
    [
        ([*STOCK, *IPC], True, []),
        ([*STOCK, *IPC], False, ["pyzmq is not installed"]),
        (IPC, False, ["only SGLang has its receiver; pyzmq is not installed"]),
        ([*STOCK, "--sglang-device", "cpu", *IPC], True, ["runs on CUDA devices only"]),
        ([*STOCK, *IPC, "--update-weight-mode", "delta"], True, ["whole tensors only", "applies no deltas"]),
    ],
)
def test_checkpoint_engine_says_what_it_needs(write, monkeypatch, argv, has_zmq, reasons):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_zmq else None)
    if not reasons:
        load(write(), argv)
        return
    with pytest.raises(ConfigError) as refused:
        load(write(), argv)
    assert len(refused.value.faults) == len(reasons)
    for fault, reason in zip(refused.value.faults, reasons):
        assert reason in fault.reason and fault.remedy


@pytest.mark.parametrize("there", [True, False])
def test_wandb_is_installed_or_it_is_said_what_to_install(write, monkeypatch, there):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there else None)
    words = ["--use-wandb", "--wandb-project", "x", "--wandb-mode", "offline"]
    if there:
        load(write(), words)
    else:
        fault = only(write(), words)
        assert fault.where == "--use-wandb" and "pip install wandb" in fault.remedy


@pytest.mark.parametrize("argv", ACCEPTED, ids=" ".join)
def test_accepted(write, places, argv):
    load(write(), argv)


def test_a_bad_value_only_in_the_file_is_caught_after_all_layers(write):
    path = write("rollout_top_p: 0.5\n")
    assert only(path, []).where == "--rollout-top-p (quick.yaml:5)"
    load(path, ["--rollout-top-p", "1"])


@pytest.mark.parametrize("transport", ["disk", "tensor", "group"])
@pytest.mark.parametrize("devices", [[], ["--colocate"]], ids=["apart", "colocated"])
@pytest.mark.parametrize("schedule", ["sync", "pipelined", "async"])
def test_cfg_01_every_layout_schedule_and_transport_with_every_switch(write, schedule, devices, transport):
    """Giving memory back is legal in sync, whatever the layout and the way of the weights; a switch that stands
    only in the file is caught as well."""
    words = ["--schedule", schedule, "--update-weight-transport", transport, *devices]
    load(write(), words)
    for switch in ("offload", "offload_train", "offload_rollout"):
        path = write(f"{switch}: true\n")
        if schedule == "sync":
            load(path, words)
        else:
            fault = only(path, words)
            assert switch.replace("_", "-") in fault.where and "--schedule sync" in fault.remedy


@pytest.mark.parametrize(
    ("argv", "flags", "neighbour"),
    [
        ([*EXTERNAL, "--sglang-config", "quick.yaml"], ["--sglang-config", "--rollout-external-engine-addrs"],
         EXTERNAL),
        ([*DELTA, "--update-weight-transport", "tensor"], ["--update-weight-mode", "--update-weight-transport"],
         [*DELTA, "--update-weight-transport", "group"]),
        (["--colocate", "--offload", *DELTA], ["--update-weight-mode", "--offload"],
         ["--colocate", "--offload-train", *DELTA]),
        (["--update-weight-encoding", "xor"], ["--update-weight-encoding", "--update-weight-mode"],
         [*DELTA, "--update-weight-encoding", "xor"]),
    ],
    ids=["groups of others", "deltas by handle", "deltas colocated", "encoding"],
)  # fmt: skip
def test_cfg_08_each_illegal_pair_names_both_flags_and_two_faults_are_told_at_once(
    write, argv, flags, neighbour
):
    known = load(write(), neighbour)
    assert known.update_weight_transport == "disk" or known.weight_folder is None
    lines = [fault.line() for fault in faults_of(write(), argv)]
    assert any(all(flag in line for flag in flags) for line in lines), lines
    both = [fault.line() for fault in faults_of(write(), [*argv, "--rollout-temperature", "0"])]
    assert set(lines) < set(both) and any("--rollout-temperature" in line for line in both)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_cfg_13_rollouts_are_sampled_at_a_temperature_and_evaluation_may_be_greedy(write, value):
    assert only(write(), ["--rollout-temperature", value]).where == "--rollout-temperature"
    if value == "0":
        load(write(), [*EVAL, "--eval-temperature", value])
    else:
        assert only(write(), [*EVAL, "--eval-temperature", value]).where == "--eval-temperature"


@pytest.mark.parametrize(
    ("argv", "other"),
    [
        (["--save", "out", "--save-hf", "./x/../out"], "--save"),
        (["--prompt-data", "train.jsonl@[0:1]", *ONE_BATCH, "train.jsonl"], "--prompt-data"),
        ([*EVAL, "--eval-prompt-data", "held.jsonl@[:1]", *ONE_BATCH, "./held.jsonl"], "--eval-prompt-data"),
        ([*ONE_BATCH, "quick.yaml", *LOADED], "--load-debug-rollout-data"),
        (
            [*ONE_BATCH, "s/0.st", "--load-debug-rollout-data", "s/{rollout_id}.st"],
            "--load-debug-rollout-data",
        ),
        (
            [*ONE_BATCH, "s/{rollout_id}.st", "--load-debug-rollout-data", "s/0.st"],
            "--load-debug-rollout-data",
        ),
        (["--run-dir", "out", "--save-debug-rollout-data", "out", "--num-rollout", "1"], "--run-dir"),
        (["--eval-config", "quick.yaml", *ONE_BATCH, "quick.yaml"], "--eval-config"),
        ([*PPO, "--critic-load", "s", "--save-hf", "s/."], "--critic-load"),
    ],
)
def test_cfg_17_no_output_is_another_ones_place_nor_that_of_an_input(write, folder, argv, other):
    (folder / "s").mkdir()
    (folder / "s" / "0.st").write_text("")
    told = [fault for fault in faults_of(write(), argv) if "the same place" in fault.reason]
    assert len(told) == 1 and f"the same place as {other}" in told[0].reason


def test_checks_go_on_where_other_options_are_faulty(write):
    """n_samples_per_prompt is no number, so nothing that needs it is said, and the rest is."""
    argv = [
        "--n-samples-per-prompt",
        "x",
        "--global-batch-size",
        "7",
        "--max-lead",
        "1",
        "--kl-loss-coef",
        "1",
    ]
    flags = [fault.where for fault in faults_of(write(), argv)]
    assert sorted(flags) == ["--kl-loss-coef", "--max-lead", "--n-samples-per-prompt"]


def test_the_nearest_divisors_are_told(write):
    assert "nearest that do: 4, 8" in only(write(), ["--global-batch-size", "7"]).remedy


def test_every_check_is_tripped_by_a_case(write, places, monkeypatch):
    """A check that no case above trips would be untested."""
    tripped: set[str] = set()

    def watched(check):
        def run(config):
            for fault in check(config):
                tripped.add(check.__name__)
                yield fault

        return run

    monkeypatch.setattr(checks, "CHECKS", tuple(watched(check) for check in checks.CHECKS))
    names = {check.__name__ for check in CHECKS}
    for argv, _, _ in REFUSED:
        faults_of(write(), argv)
    for number, (groups, argv, _) in enumerate(MISTAKES):
        write(groups, f"{number}.yaml").write_text(groups)
        faults_of(write(), ["--sglang-config", f"{number}.yaml", *argv])
    assert tripped == names


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        ([], "samples_per_rollout", 256),
        ([], "inner_steps", 1),
        ([], "optimizer_samples", 256),
        (["--global-batch-size", "64"], "inner_steps", 4),
        (["--num-steps-per-rollout", "8"], "optimizer_samples", 32),
        ([], "prompt_limit", None),
        (["--rollout-max-context-len", "1024"], "prompt_limit", 1023),
        (["--rollout-max-prompt-len", "9"], "prompt_limit", 9),
        ([], "eval_response_limit", 256),
        ([*EVAL, "--eval-max-response-len", "16"], "eval_response_limit", 16),
        ([], "clip_range", (0.2, 0.2)),
        (["--eps-clip-high", "0.28"], "clip_range", (0.2, 0.28)),
        (["--advantage-estimator", "dapo"], "clip_range", (0.2, 0.28)),
        (["--advantage-estimator", "dapo", "--eps-clip", "0.1"], "clip_range", (0.1, 0.1)),
        (["--advantage-estimator", "gspo", "--eps-clip-high", "0.1"], "clip_range", (3e-4, 0.1)),
        (["--label-key", "y"], "eval_keys", ("input", "y")),
        (
            ["--label-key", "y", *EVAL, "--eval-input-key", "q", "--eval-label-key", "a"],
            "eval_keys",
            ("q", "a"),
        ),
        ([], "reward", "exact"),
        (["--no-rm-type", "--prompt-data", "reasoning_gym:x"], "reward", "reasoning_gym"),
        (["--no-rm-type", "--custom-rm-path", "a.b"], "reward", "a.b"),
        ([], "min_group", 8),
        (["--group-failure-policy", "survivors"], "min_group", 2),
    ],
)
def test_derived_values(write, argv, name, value):
    assert getattr(load(write(), argv), name) == value


def test_threads_follow_the_machine_unless_given(write):
    config = load(write(), ["--rollout-num-engines", "3"])
    assert config.engine_thread_count(8) == 2 and config.engine_thread_count(2) == 1
    assert config.trainer_thread_count(8) == 8
    given = load(write(), ["--engine-threads", "1", "--trainer-threads", "4"])
    assert (given.engine_thread_count(8), given.trainer_thread_count(8)) == (1, 4)
