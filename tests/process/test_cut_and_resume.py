"""A request that is aborted on one engine process and goes on on another, over HTTP, in float32."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.engine_models import make_model
from tests.engine_process import parts, two_engines

NEW = 400
PROMPT = list(range(10, 51))
PARAMS = {"temperature": 0.8, "top_k": 50, "sampling_seed": 11}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("model"), "qwen3", torch.float32)
    yield from two_engines(model, tmp_path_factory, "--dtype", "float32", "--max-total-tokens", "4096")


def test_the_rest_is_what_an_uncut_request_has(engines):
    first, second = engines
    whole = parts(second.generate(PROMPT, NEW, **PARAMS))
    cuts = set()
    for wait_s in (0.0, 0.1, 0.3):
        with ThreadPoolExecutor(1) as pool:
            cut = pool.submit(first.generate, PROMPT, NEW, f"cut-{wait_s}", **PARAMS)
            first.wait_for(lambda load: load["num_running_reqs"] == 1)
            time.sleep(wait_s)
            first.call("/abort_request", {"rid": f"cut-{wait_s}"})
            status, row = cut.result()
        assert status == 200 and row["meta_info"]["finish_reason"]["type"] == "abort"
        tokens, logprobs = parts((status, row))
        cuts.add(len(tokens))
        more, their = parts(second.generate([*PROMPT, *tokens], NEW - len(tokens), **PARAMS))
        assert (tokens + more, logprobs + their) == whole
    assert len(cuts) > 1 and max(cuts) > 0
