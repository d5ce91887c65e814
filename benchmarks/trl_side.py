"""The TRL half of `benchmarks.e2e`: one GRPOTrainer run, measured, in TRL's own environment.

Run as `python trl_side.py REQUEST.json RESULT.json` by that environment's interpreter. Imports nothing of
Turnout. GRPOTrainer itself is unmodified; a subclass reads the clock around three of its methods.

Promises: every completion has exactly `new_tokens` tokens or the result says otherwise in
`tokens_per_completion`; the seconds of a step add up (`generation + training + other = total`); a mode that
can't run exits 0 with `error` set to the exception's own text.
"""

# ruff: noqa: PLC0415  torch and vLLM are imported after their environment is set
# pyright: reportMissingImports=false

import json
import os
import resource
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from hash_reward import score  # beside this file, which runs as a script

# transformers: `generate`; paged: transformers' continuous batching; vllm: vLLM colocated, as TRL has it;
# vllm_unpacked: the same with vLLM's packing of CPU weights off, since TRL can't update packed weights.
MODES = ("transformers", "paged", "vllm", "vllm_unpacked")


@dataclass(frozen=True)
class Request:
    """What to run. `prompts` holds one list of texts per optimizer step, the warm-up step first."""

    model: str
    prompts: list[list[str]]
    group_size: int
    new_tokens: int
    learning_rate: float
    generation: str  # one of MODES
    weights: str  # "bfloat16": bf16 weights and optimizer; "mixed": fp32 ones, bf16 autocast; "float32"
    threads: int
    micro_batch: int  # sequences per forward and backward
    max_length: int  # prompt plus completion, tokens
    seed: int = 0
    torch_compile: bool = False
    vllm_correction: bool = False  # TRL's extra forward that corrects for vLLM's numerics
    kv_gib: int = 2  # cache of vLLM
    paged: dict[str, Any] = field(default_factory=dict)

    @property
    def vllm(self) -> bool:
        """Whether vLLM generates."""
        return self.generation in ("vllm", "vllm_unpacked")

    @property
    def samples(self) -> int:
        """Completions per optimizer step."""
        return len(self.prompts[0]) * self.group_size


@dataclass
class Step:
    """Seconds and tokens of one optimizer step."""

    total: float = 0.0
    cpu: float = 0.0  # CPU seconds of all threads; far below threads x total on a busy machine
    generation: float = 0.0
    weight_sync: float = 0.0  # part of generation: weights handed to vLLM
    prepare: float = 0.0  # generation, rewards, padding, old log-probs
    prompt_tokens: int = 0
    response_tokens: int = 0
    shortest: int = 1 << 30
    longest: int = 0

    def record(self) -> dict[str, float | int]:
        """The step with the three disjoint parts of its time."""
        row = asdict(self)
        row["training"] = self.total - self.prepare
        row["other"] = self.prepare - self.generation
        return row


def reward(completions: list[str], **_: object) -> list[float]:
    """`hash_reward.score` as TRL calls a reward."""
    return [score(text) for text in completions]


def set_environment(request: Request) -> None:
    """Before torch or vLLM is imported."""
    os.environ["OMP_NUM_THREADS"] = str(request.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"
    if request.vllm:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(request.kv_gib)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # training runs in the same process and threads
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # TRL's colocate mode reaches into the engine
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def config_arguments(request: Request, output_dir: str) -> dict[str, Any]:
    """GRPOConfig's arguments, apart from the model's."""
    exact: dict[str, Any] = {
        "transformers": {"min_new_tokens": request.new_tokens},
        # Continuous batching drops the minimum-length processor; without a stop token it runs to the maximum.
        "paged": {"eos_token_id": -1},
        "vllm": {"min_tokens": request.new_tokens, "ignore_eos": True, "detokenize": False},
    }[request.generation.removesuffix("_unpacked")]
    if request.samples % request.micro_batch:
        raise ValueError(f"micro_batch {request.micro_batch} does not divide {request.samples} samples")
    return {
        "output_dir": output_dir,
        "use_cpu": True,
        "bf16": request.weights == "mixed",
        "per_device_train_batch_size": request.micro_batch,
        "gradient_accumulation_steps": request.samples // request.micro_batch,
        "num_generations": request.group_size,
        "max_completion_length": request.new_tokens,
        "generation_kwargs": exact,
        "max_steps": len(request.prompts),
        "learning_rate": request.learning_rate,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "num_iterations": 1,
        "temperature": 1.0,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "torch_compile": request.torch_compile,
        "use_transformers_continuous_batching": request.generation == "paged",
        "transformers_continuous_batching_config": request.paged or None,
        "use_vllm": request.vllm,
        "vllm_mode": "colocate",
        "vllm_max_model_length": request.max_length,
        "vllm_importance_sampling_correction": request.vllm_correction,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": request.seed,
        "model_init_kwargs": {"dtype": request.weights.replace("mixed", "float32")},
    }


def build(request: Request, output_dir: str) -> tuple[Any, list[Step]]:
    """The timed trainer and the list that its steps are written to."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    steps: list[Step] = []
    mark = [0.0, 0.0]

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            completions, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            step = steps[-1]
            step.generation += time.perf_counter() - start
            lengths = [len(c) for c in completions]
            step.prompt_tokens += sum(len(p) for p in prompt_ids)
            step.response_tokens += sum(lengths)
            step.shortest, step.longest = min(step.shortest, *lengths), max(step.longest, *lengths)
            return completions, logprobs

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            start = time.perf_counter()
            batch = super()._prepare_inputs(generation_batch)
            steps[-1].prepare += time.perf_counter() - start
            return batch

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            mark[:] = time.perf_counter(), time.process_time()
            steps.append(Step())

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            now = time.perf_counter(), time.process_time()
            steps[-1].total, steps[-1].cpu = now[0] - mark[0], now[1] - mark[1]
            mark[:] = now
            if state.global_step < args.max_steps:
                steps.append(Step())

    rows = [{"prompt": text} for step in request.prompts for text in step]
    tokenizer = AutoTokenizer.from_pretrained(request.model, padding_side="left")
    trainer = Timed(
        model=request.model,
        args=GRPOConfig(**config_arguments(request, output_dir)),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    if request.vllm:
        time_weight_sync(trainer.vllm_generation, steps)
    return trainer, steps


def keep_plain_weights() -> None:
    """Makes vLLM multiply with the weights as they are.

    vLLM's CPU backend packs every matrix after loading and drops the original, and TRL's colocated update writes
    into the original: an AttributeError at the first update. With plain matrices the same update works.
    """
    import torch
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def time_weight_sync(generation: Any, steps: list[Step]) -> None:
    """Adds the seconds of every weight hand-over to the current step."""
    inner = generation.sync_weights

    def timed() -> None:
        start = time.perf_counter()
        inner()
        steps[-1].weight_sync += time.perf_counter() - start

    generation.sync_weights = timed


def versions() -> dict[str, str]:
    """Installed versions of what matters here."""
    names = ("torch", "transformers", "trl", "accelerate", "vllm-cpu")
    found = {d.metadata["Name"] for d in metadata.distributions()}
    return {name: metadata.version(name) for name in names if name in found}


def measure(request: Request, output_dir: str) -> dict[str, Any]:
    """Trains and returns the steps, the settings and what was moved."""
    import torch

    torch.set_num_threads(request.threads)
    if request.generation == "vllm_unpacked":
        keep_plain_weights()
    start = time.perf_counter()
    trainer, steps = build(request, output_dir)
    ready = time.perf_counter()
    trainer.train()
    dtypes = {str(p.dtype) for p in trainer.model.parameters()}
    return {
        "error": None,
        "seconds_setup": ready - start,
        "steps": [step.record() for step in steps],
        "optimizer_steps": trainer.state.global_step,
        "samples_per_step": request.samples,
        "tokens_per_completion": [min(s.shortest for s in steps), max(s.longest for s in steps)],
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "weight_dtype": sorted(dtypes),
        "optimizer": f"{trainer.args.optim} (states in the weights' dtype)",
        "threads": torch.get_num_threads(),
        "settings": config_arguments(request, ""),
        "versions": versions(),
    }


def main(request_path: str, result_path: str) -> None:
    """Reads the request, writes the result."""
    request = Request(**json.loads(Path(request_path).read_text()))
    set_environment(request)
    try:
        result = measure(request, str(Path(result_path).parent / "trl-output"))
    except Exception as problem:  # noqa: BLE001  the benchmark reports why a mode can't run
        traceback.print_exc()
        result = {"error": f"{type(problem).__name__}: {problem}", "versions": versions()}
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
