"""Tokens per second of the embedded engine against vLLM's CPU build and transformers: same model, same threads.

    python -m benchmarks.engine --json FILE [--threads N] [--repeats N] [--sides ...] [--concurrency 1 8 32]

SmolLM2-135M in bf16, 48 tokens in, 64 out, temperature 1, log-probs of the sampled tokens on. Turnout runs as its
users run it, an engine process over HTTP; the others in-process, which spares them HTTP. All sides stay loaded and
are measured in turns, `repeats` times; figures are medians. Also: 8 samples per prompt (shared prefix), the
accuracy of log-probs on 50 texts against float32, and the machine's own limits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import machine
from benchmarks.trl_env import interpreter
from turnout.placement.real import RealClock
from turnout.protocol.sglang import GenerateRequest, SamplingParams
from turnout.serving.launcher import Engine, EngineLaunch, launch
from turnout.train.model_zoo import fetch

SIDES = ("turnout", "vllm_cpu", "transformers_generate", "transformers_continuous")
PROMPT, NEW = 48, 64
TEXTS, TEXT_TOKENS = 50, 96
DEADLINE_S = 900.0
DOCS = Path(__file__).parent.parent / "docs"


@dataclass(frozen=True)
class Load:
    """One measurement: `prompts` prompts of `prompt_tokens`, each asked `samples` times, all at once."""

    name: str
    prompts: int
    samples: int
    prompt_tokens: int = PROMPT

    def make(self, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        made = [[rng.randrange(100, 49000) for _ in range(self.prompt_tokens)] for _ in range(self.prompts)]
        return [prompt for prompt in made for _ in range(self.samples)]


class Child:
    """A side of benchmarks.engine_side in its own process."""

    def __init__(self, side: str, model: Path, threads: int, log: Path) -> None:
        python = interpreter("trl-vllm" if side == "vllm_cpu" else "trl")
        extra = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        if side == "vllm_cpu":  # vLLM's own advice
            extra["LD_PRELOAD"] = str(python.parent.parent / "lib" / "libiomp5.so")
        self._log = log.open("wb")
        script = str(Path(__file__).with_name("engine_side.py"))
        self._process = subprocess.Popen(
            [str(python), script, side, str(model), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=os.environ | extra,
        )  # fmt: skip
        if not self._answer().get("ready"):
            raise RuntimeError(f"{side} did not start; see {log}")

    def generate(self, prompts: list[list[int]]) -> dict[str, Any]:
        return self._ask({"cmd": "generate", "prompts": prompts, "new": NEW})

    def score(self, texts: list[list[int]]) -> list[list[float]]:
        return self._ask({"cmd": "score", "texts": texts})["logprobs"]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _ask(self, row: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(row), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side ended with {self._process.wait()}; see {self._log.name}")
        return json.loads(line)


class Turnout:
    """The embedded engine over HTTP, all requests at once."""

    def __init__(self, model: Path, threads: int, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        arguments = ("--model-path", str(model), "--threads", str(threads), "--max-running-requests", "64")
        spec = EngineLaunch("bench", arguments, threads, folder, DEADLINE_S)
        self._engine: Engine = self._loop.run_until_complete(launch(spec, RealClock()))
        self._asked = 0

    def generate(self, prompts: list[list[int]]) -> dict[str, Any]:
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)

        async def all_at_once() -> int:
            asked = []
            for prompt in prompts:
                self._asked += 1
                request = GenerateRequest(f"bench-{self._asked}", tuple(prompt), params)
                asked.append(self._engine.client.generate(request, DEADLINE_S))
            return sum(len(reply.logprobs) for reply in await asyncio.gather(*asked))

        start = time.perf_counter()
        tokens = self._loop.run_until_complete(all_at_once())
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    def score(self, texts: list[list[int]]) -> list[list[float]]:
        url = self._engine.client.address.url + "/generate"
        made = []
        for text in texts:
            body = {
                "input_ids": text,
                "return_logprob": True,
                "logprob_start_len": 0,
                "sampling_params": {"max_new_tokens": 1},
            }
            asked = urllib.request.Request(
                url, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=DEADLINE_S) as reply:
                row = json.load(reply)
            made.append([pair[0] for pair in row["meta_info"]["input_token_logprobs"][1:]])
        return made

    def stop(self) -> None:
        self._loop.run_until_complete(self._engine.stop())
        self._loop.close()


def measure(sides: dict[str, Any], loads: list[Load], repeats: int) -> dict[str, dict[str, Any]]:
    """Each side on each load, in turns; the first round of all is a warm-up."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(repeats + 1):
        for load in loads:
            prompts = load.make(turn)
            for name, side in sides.items():
                made = side.generate(prompts)
                if made["tokens"] != NEW * len(prompts):
                    raise RuntimeError(f"{name} made {made['tokens']} tokens, not {NEW * len(prompts)}")
                if turn:
                    seconds.setdefault((name, load.name), []).append(made["seconds"])
                print(f"{load.name:>12} {name:24} {made['seconds']:.3f} s", file=sys.stderr)
    results: dict[str, dict[str, Any]] = {name: {} for name in sides}
    for load in loads:
        for name in sides:
            taken = seconds[name, load.name]
            requests = load.prompts * load.samples
            results[name][load.name] = {
                "tokens_per_second": round(NEW * requests / median(taken), 1),
                "ms_per_step": round(1000 * median(taken) / NEW, 2),
                "seconds": [round(s, 4) for s in taken],
            }
    return results


def accuracy(sides: dict[str, Any], model: Path) -> dict[str, float]:
    """Mean absolute difference of log-probs from float32, over the tokens of 50 texts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    words = " ".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    ids = tokenizer(words)["input_ids"]
    texts = [ids[at * TEXT_TOKENS : (at + 1) * TEXT_TOKENS] for at in range(TEXTS)]
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        rows = exact(torch.tensor(texts)).logits[:, :-1].log_softmax(-1)
    want = rows.gather(2, torch.tensor(texts)[:, 1:, None])[..., 0]
    return {
        name: round(float((torch.tensor(side.score(texts)) - want).abs().mean()), 5)
        for name, side in sides.items()
        if name in ("turnout", "vllm_cpu")
    }


def roofline(model: Path, threads: int) -> dict[str, float]:
    """What the machine allows: reading every weight once a step, and the products of 32 rows."""
    torch.set_num_threads(threads)
    big = torch.ones(1 << 28)
    a, b = torch.ones(2048, 2048, dtype=torch.bfloat16), torch.ones(2048, 2048, dtype=torch.bfloat16)
    bandwidth = big.nbytes / _best(big.sum)
    rate = 2 * 2048**3 / _best(lambda: a @ b)
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).num_parameters()
    by_memory, by_products = bandwidth / (2 * weights), rate / (2 * weights)
    return {
        "read_gb_per_second": round(bandwidth / 1e9, 1),
        "bf16_product_gflops": round(rate / 1e9, 1),
        "tokens_per_second_at_1": round(by_memory, 1),
        "tokens_per_second_at_32": round(min(32 * by_memory, by_products), 1),
    }


def _best(work: Callable[[], object], times: int = 7) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Turnout's tokens per second over each other side's."""
    ours = results.get("turnout", {})
    return {
        name: {
            load: round(ours[load]["tokens_per_second"] / row[load]["tokens_per_second"], 2) for load in row
        }
        for name, row in results.items()
        if name != "turnout" and ours
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=machine.cpus())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--model", default="smollm2-135m")
    asked = parser.parse_args()
    model = fetch(asked.model)
    loads = [Load(str(n), n, 1) for n in asked.concurrency]
    loads += [Load("8_samples", 4, 8), Load("8_samples_long_prompt", 4, 8, 512)]
    report: dict[str, Any] = {
        "machine": machine.describe(),
        "threads": asked.threads,
        "repeats": asked.repeats,
    }
    sides: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in asked.sides:
                if name == "turnout":
                    sides[name] = Turnout(model, asked.threads, Path(folder))
                else:
                    sides[name] = Child(name, model, asked.threads, Path(folder) / f"{name}.log")
            report |= measure(sides, loads, asked.repeats)
            report["logprob_error"] = accuracy(sides, model)
        finally:
            for side in sides.values():
                side.stop()
    report["roofline"] = roofline(model, asked.threads)
    report["ratios"] = ratios({name: report[name] for name in asked.sides})
    asked.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: report[k] for k in ("ratios", "logprob_error", "roofline")}, indent=1))


if __name__ == "__main__":
    main()
