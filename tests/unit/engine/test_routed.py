"""The experts that a request's positions went through, against the routers of plain transformers."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine_models import make_model
from turnout.engine.core import EngineCore
from turnout.engine.generate_request import Prompt, parse_generate
from turnout.engine.model import load_model
from turnout.engine.replies import reply_row
from turnout.engine.requests import BadRequest
from turnout.engine.settings import EngineSettings

IDS = list(range(3, 43))


class Bench:
    def __init__(self, folder, **settings):
        chosen = {"max_total_tokens": 1024, "max_running_requests": 4, "page_tokens": 16} | settings
        asked = EngineSettings(folder, dtype="float32", **chosen)
        self.model = load_model(asked)
        self.core = EngineCore(self.model, asked, lambda _request: None)

    def ask(self, *bodies, retract_at=()):
        """The meta_info of each reply, and all its token ids."""
        rows = [{"return_logprob": True, "return_routed_experts": True, **body} for body in bodies]
        prompts: list[Prompt] = [parse_generate(row, self.model).prompts[0] for row in rows]
        for prompt in prompts:
            self.core.submit(prompt.request)
        while self.core.step():
            self.core.check()
            if self.core.load.steps in retract_at:
                self.core.pause("retract")
                self.core.flush_cache()
                self.core.resume()
        return [(reply_row(p, self.model)["meta_info"], p.request.tokens) for p in prompts]


def body(ids=IDS, new=12, **more):
    return {"input_ids": list(ids), "sampling_params": {"max_new_tokens": new, "ignore_eos": True}, **more}


def rows_of(meta):
    return np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(-1, 2, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("moe"), "qwen3_moe")


@pytest.fixture(scope="module")
def wanted(folder):
    """[positions, layers, k] of a sequence of tokens, but for its last one."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def of(tokens):
        with torch.no_grad():
            routers = plain(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
        return torch.stack([logits.topk(2, -1).indices for logits in routers], 1).numpy()

    return of


def test_every_position_but_the_last_has_its_experts(folder, wanted):
    for meta, tokens in Bench(folder).ask(body(), body(IDS[:7], new=20), body([5], new=1)):
        assert np.array_equal(rows_of(meta), wanted(tokens))


def test_prompts_in_chunks_and_preempted_requests_have_theirs(folder, wanted):
    bench = Bench(folder, max_step_tokens=9)
    for meta, tokens in bench.ask(body(), body(list(reversed(IDS)), new=30), retract_at=(3, 12, 20)):
        assert np.array_equal(rows_of(meta), wanted(tokens))
    assert bench.core.load.preempted


def test_a_prompt_from_the_prefix_cache_keeps_its_experts(folder, wanted):
    bench = Bench(folder)
    bench.ask(body(return_routed_experts=False))  # who left them there did not ask
    ((meta, tokens),) = bench.ask(body(new=5))
    assert meta["cached_tokens"] == 32
    assert np.array_equal(rows_of(meta), wanted(tokens))


@pytest.mark.parametrize("start", [0, 7, 33, len(IDS)])
def test_rows_begin_where_they_are_asked_for(folder, wanted, start):
    bench = Bench(folder)
    for _ in range(2):  # the second time from the cache
        ((meta, tokens),) = bench.ask(body(routed_experts_start_len=start))
        assert np.array_equal(rows_of(meta), wanted(tokens)[start:])


def test_a_request_without_new_tokens_has_those_of_its_prompt(folder, wanted):
    ((meta, tokens),) = Bench(folder).ask(body(new=0, logprob_start_len=0))
    assert np.array_equal(rows_of(meta), wanted(tokens))


def test_nothing_is_told_that_nobody_asked_for(folder):
    ((meta, _),) = Bench(folder).ask(body(return_routed_experts=False))
    assert "routed_experts" not in meta


@pytest.mark.parametrize(
    ("kind", "row", "said"),
    [
        ("llama", {}, "return_routed_experts = true: this model has no experts"),
        ("qwen3_moe", {"routed_experts_start_len": 41}, "must be from 0 to the number of prompt tokens, 40"),
        ("qwen3_moe", {"return_routed_experts": 1}, "must be true or false"),
        ("qwen3_moe", {"bootstrap_room": 3}, "split over two engines"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path, kind, row, said):
    bench = Bench(make_model(tmp_path, kind))
    with pytest.raises(BadRequest, match=said):
        bench.ask(body(**row))
