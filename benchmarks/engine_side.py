"""One side of benchmarks.engine, in a process of its own: `python engine_side.py SIDE MODEL THREADS`.

Reads one request a line on stdin, answers one line on stdout: {"cmd": "generate", "prompts": [[id]], "new": n} ->
{"seconds", "tokens"}, all prompts at once, temperature 1, log-probs of the sampled tokens taken;
{"cmd": "score", "texts": [[id]]} -> {"logprobs": [[...]]} of every token but the first; {"cmd": "stop"}.
What a side prints besides goes to stderr. Needs nothing of the benchmark's own environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PAGE = 32  # tokens of a page of transformers' paged cache


class Vllm:
    """vLLM's CPU build in-process (no HTTP), compiled, with its prefix cache."""

    def __init__(self, model: str, threads: int) -> None:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        from vllm import LLM, SamplingParams, TokensPrompt  # noqa: PLC0415 - only this side has it

        self._params, self._prompt = SamplingParams, TokensPrompt
        self._llm = LLM(
            model, dtype="bfloat16", max_model_len=2048, max_num_seqs=64, enable_prefix_caching=True,
            logprobs_mode="processed_logprobs", disable_log_stats=True,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], new: int) -> int:
        params = self._params(
            temperature=1.0, max_tokens=new, min_tokens=new, ignore_eos=True, logprobs=0, detokenize=False
        )
        made = self._llm.generate([self._prompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
        assert all(len(m.outputs[0].logprobs) == new for m in made)
        return sum(len(m.outputs[0].token_ids) for m in made)

    def score(self, texts: list[list[int]]) -> list[list[float]]:
        params = self._params(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        made = self._llm.generate([self._prompt(prompt_token_ids=t) for t in texts], params, use_tqdm=False)
        return [
            [row[token].logprob for token, row in zip(text[1:], m.prompt_logprobs[1:])]
            for text, m in zip(texts, made)
        ]


class Transformers:
    """`generate` on a padded batch, or its continuous batching."""

    def __init__(self, model: str, threads: int, continuous: bool) -> None:
        import torch  # noqa: PLC0415 - after the environment is set
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - likewise

        torch.set_num_threads(threads)
        self._torch, self._continuous = torch, continuous
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()

    def generate(self, prompts: list[list[int]], new: int) -> int:
        from transformers import GenerationConfig  # noqa: PLC0415 - likewise

        config = GenerationConfig(
            max_new_tokens=new, min_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0,
            eos_token_id=-1, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        if self._continuous:
            return self._continuously(prompts, config)
        with self._torch.inference_mode():
            ids = self._torch.tensor(prompts)
            made = self._model.generate(
                ids, attention_mask=self._torch.ones_like(ids), generation_config=config
            )
            tokens = made.sequences[:, ids.shape[1] :]
            for step, logits in enumerate(made.logits):  # the log-probs that a trainer needs
                logits.float().log_softmax(-1).gather(1, tokens[:, step : step + 1])
        return tokens.numel()

    def _continuously(self, prompts: list[list[int]], config: Any) -> int:
        from transformers import ContinuousBatchingConfig  # noqa: PLC0415 - likewise

        pages = sum(-(-(len(p) + config.max_new_tokens) // PAGE) for p in prompts)
        batching = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=pages + 8, max_batch_tokens=512, return_logprobs=True
        )
        with self._torch.inference_mode():
            made = self._model.generate_batch(
                prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
            )
        assert all(len(m.logprobs) == len(m.generated_tokens) for m in made.values())
        return sum(len(m.generated_tokens) for m in made.values())


def make(side: str, model: str, threads: int) -> Any:
    if side == "vllm_cpu":
        return Vllm(model, threads)
    return Transformers(model, threads, side == "transformers_continuous")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    side = make(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["cmd"] == "stop":
            return
        if request["cmd"] == "score":
            answer = {"logprobs": side.score(request["texts"])}
        else:
            start = time.perf_counter()
            tokens = side.generate(request["prompts"], request["new"])
            answer = {"seconds": time.perf_counter() - start, "tokens": tokens}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
