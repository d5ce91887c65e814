"""Engine and trainer give the same tokens the same log-probs: the same weights, two programs.

They are not bit-equal, since the engine sums over pages and blocks of rows in an order of its own and the trainer
over packed sequences. In float32 the difference stays below FP32_BOUND (at most 7.4e-6 here);
in bf16 each rounds at its own places, so there each side's distance from float32 is what bounds it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine_models import make_model
from tests.train_models import settings_for
from turnout.core.types import TrainSample
from turnout.engine.core import EngineCore
from turnout.engine.model import load_model
from turnout.engine.request_machine import Request
from turnout.engine.settings import EngineSettings
from turnout.protocol.sglang import SamplingParams
from turnout.train.local import LocalBackend

FP32_BOUND = 2e-5
BF16_BOUND = 0.06  # nats, the mean over tokens; 0.015 to 0.032 here
PROMPTS = [list(range(5, 5 + n)) for n in (3, 18, 40, 75)]


def generated(folder, dtype: str, temperature: float) -> list[Request]:
    settings = EngineSettings(folder, dtype=dtype, max_total_tokens=2048)
    core = EngineCore(load_model(settings), settings, lambda request: None)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=temperature)
    asked = [Request(f"r{i}", list(p), params, seed=i) for i, p in enumerate(PROMPTS)]
    for request in asked:
        core.submit(request)
    while core.step():
        core.check()
    return asked


def trained_on(folder, dtype: str, temperature: float, requests: list[Request]) -> list[np.ndarray]:
    """The trainer's log-probs of the engine's tokens."""
    backend = LocalBackend(settings_for(folder, dtype=dtype, temperature=temperature))
    samples = [
        TrainSample(
            group_id="g",
            prompt_ids=tuple(request.tokens[: request.prompt_tokens]),
            response_ids=tuple(request.output),
            logprobs=tuple(request.logprobs),
            loss_mask=(1,) * request.generated,
            advantages=(0.0,) * request.generated,
        )
        for request in requests
    ]
    return backend.logprobs(samples)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_of_the_same_tokens(tmp_path, kind, temperature, dtype):
    folder = make_model(tmp_path / "m", kind, getattr(torch, dtype))
    requests = generated(folder, dtype, temperature)
    theirs = trained_on(folder, dtype, temperature, requests)
    off = np.concatenate([np.abs(np.array(r.logprobs) - t) for r, t in zip(requests, theirs)])
    assert len(off) == 80
    if dtype == "float32":
        assert off.max() <= FP32_BOUND, off.max()
    else:
        assert off.mean() <= BF16_BOUND, off.mean()
