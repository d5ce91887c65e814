"""A result does not depend on what else is in the batch: bit for bit, over models, dtypes, threads, chunk
sizes, preemption and resumption. And the log-probs are those of a plain forward of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.engine_models import KINDS, make_model
from turnout.core.types import Finish
from turnout.engine.core import EngineCore
from turnout.engine.linear import row_blocks
from turnout.engine.model import load_model
from turnout.engine.request_machine import Request
from turnout.engine.settings import EngineSettings
from turnout.protocol.sglang import SamplingParams

MIX = [  # prompt tokens, new tokens, sampling
    (7, 24, {}),
    (41, 17, {"temperature": 0.7, "top_p": 0.9}),
    (100, 9, {"temperature": 0.0}),
    (3, 30, {"temperature": 1.3, "top_k": 40}),
    (16, 16, {"min_p": 0.02}),
    (90, 12, {}),
]


def requests(mix=MIX) -> list[Request]:
    made = []
    for i, (prompt, new, row) in enumerate(mix):
        gen = torch.Generator().manual_seed(i)
        ids = torch.randint(3, 300, (prompt,), generator=gen).tolist()
        params = SamplingParams(max_new_tokens=new, ignore_eos=True, **row)
        made.append(Request(f"r{i}", ids, params, seed=1000 + i))
    return made


class Bench:
    """One loaded model; each run is a fresh core with other settings."""

    def __init__(self, folder: Path, dtype: str, runner: str) -> None:
        self.folder, self.dtype = folder, dtype
        self.model = load_model(EngineSettings(folder, dtype=dtype, runner=runner))

    def run(
        self, asked: list[Request], threads: int = 1, **settings
    ) -> dict[str, tuple[list[int], list[float]]]:
        before = torch.get_num_threads()
        ended: dict[str, tuple[list[int], list[float]]] = {}
        chosen = {"max_total_tokens": 4096, "max_running_requests": 8} | settings
        try:
            torch.set_num_threads(threads)
            done = lambda r: ended.__setitem__(r.rid, (r.output, r.logprobs))  # noqa: E731
            core = EngineCore(self.model, EngineSettings(self.folder, dtype=self.dtype, **chosen), done)
            for request in asked:
                core.submit(request)
            while core.step():
                core.check()
            self.preempted = core.load.preempted
        finally:
            torch.set_num_threads(before)
        assert core.load.used_pages == 0
        return ended


PATHS = [(kind, dtype, "auto") for kind in KINDS for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module", params=[*PATHS, ("llama", "bfloat16", "module")], ids=str)
def bench(request, tmp_path_factory) -> Bench:
    kind, dtype, runner = request.param
    folder = make_model(tmp_path_factory.mktemp("model"), kind, getattr(torch, dtype))
    return Bench(folder, dtype, runner)


def test_alone_equals_among_others(bench):
    together = bench.run(requests())
    for request in requests():
        assert bench.run([request])[request.rid] == together[request.rid]
    assert bench.run(requests()[::-1]) == together


def test_requests_that_share_their_prompt_equal_each_alone(bench):
    def alike() -> list[Request]:
        tokens = requests([(41, 9, {})])[0].tokens
        params = SamplingParams(max_new_tokens=9, ignore_eos=True)
        return [Request(f"s{member}", list(tokens), params, member) for member in range(6)]

    shared = alike()
    together = bench.run(shared)
    assert [request.cached for request in shared] == [0] + [32] * 5
    for request in alike():
        assert bench.run([request])[request.rid] == together[request.rid]


def test_a_second_turn_on_cached_pages_equals_one_without_a_cache(bench):
    def turns(core: EngineCore, ended: dict[str, Request], keep: bool) -> list[Request]:
        made: list[Request] = []
        for turn in range(3):
            before = made[-1].tokens if made else []
            tokens = [*before, *requests([(21 + 4 * turn, 1, {})])[0].tokens]
            request = Request(f"t{turn}", tokens, SamplingParams(max_new_tokens=18, ignore_eos=True), turn)
            made.append(request)
            core.submit(request)
            while core.step():
                core.check()
            if not keep:
                assert core.flush_cache()
        return made

    settings = EngineSettings(
        bench.folder, dtype=bench.dtype, max_total_tokens=1024, max_running_requests=8, max_step_tokens=24
    )
    runs = []
    for keep in (True, False):
        ended: dict[str, Request] = {}
        core = EngineCore(bench.model, settings, lambda r, to=ended: to.__setitem__(r.rid, r))
        runs.append(turns(core, ended, keep))
        assert core.load.used_pages == 0
    cached, plain = runs
    assert [r.cached for r in cached] == [0, 32, 80] and [r.cached for r in plain] == [0, 0, 0]
    assert [(r.output, r.logprobs) for r in cached] == [(r.output, r.logprobs) for r in plain]


def test_log_probs_of_the_prompt_are_those_it_was_sampled_with(bench):
    """Prompt and answer of requests at temperature 1, scored as prompts: chunked, cached, preempted, together."""
    made = requests([(41, 40, {}), (7, 30, {"top_k": 9})])
    sampled = bench.run(made)
    for start, new, settings in (
        (0, 0, {}),
        (20, 3, {"max_step_tokens": 8}),
        (5, 0, {"max_total_tokens": 96}),
    ):
        scored = []
        for at, request in enumerate(made):
            tokens = request.tokens[: request.prompt_tokens] + sampled[request.rid][0]
            params = SamplingParams(max_new_tokens=new, temperature=0.3, ignore_eos=True)
            scored.append(
                Request(f"s{at}", tokens, params, at, logprob_start=min(start, request.prompt_tokens - 1))
            )
        bench.run([*requests()[:2], *scored] if not new else scored, **settings)
        for request, original in zip(scored, made):
            assert len(request.input_logprobs) == request.prompt_tokens - 1 - request.logprob_start
            answer = sampled[original.rid][1]
            tail = request.input_logprobs[-len(answer) :]
            assert tail == pytest.approx(answer, abs=2e-6) and request.generated == new


def test_chunked_prefill_equals_one_shot(bench):
    assert bench.run(requests(), max_step_tokens=8) == bench.run(requests(), max_step_tokens=512)


def test_preemption_changes_nothing(bench):
    growing = [(5 + i, 60, {"temperature": 1.0 - 0.2 * i}) for i in range(4)]
    tight = bench.run(requests(growing), max_total_tokens=160)
    assert bench.preempted > 0
    assert tight == bench.run(requests(growing))


def test_two_threads_are_invariant_too(bench):
    few = [(7, 6, {}), (41, 5, {"temperature": 0.7}), (20, 6, {}), (3, 6, {}), (30, 4, {})]
    together = bench.run(requests(few), threads=2)
    chunked = bench.run(requests(few), threads=2, max_step_tokens=24)
    alone = bench.run(requests(few)[1:2], threads=2)
    assert together == chunked and alone["r1"] == together["r1"]


def test_a_cut_and_resumed_request_equals_an_uncut_one(bench):
    whole = bench.run(requests())
    for cut in (1, 8, 15):
        asked = requests()[1]
        prompt = len(asked.tokens)
        resumed = Request("r1", asked.tokens + whole["r1"][0][:cut], asked.params, asked.seed)
        resumed.params = SamplingParams(max_new_tokens=17 - cut, ignore_eos=True, temperature=0.7, top_p=0.9)
        tokens, logprobs = bench.run([resumed, *requests()[2:]])["r1"]
        assert tokens == whole["r1"][0][cut:] and logprobs == whole["r1"][1][cut:], prompt


def test_a_request_aborted_at_any_token_goes_on_on_another_engine(bench):
    """The client's side of it: what came is sent again behind the prompt, with the same seed, elsewhere."""
    new = 20
    row = {"temperature": 0.7, "top_p": 0.9, "ignore_eos": True}
    prompt = requests([(41, 1, {})])[0].tokens
    whole = bench.run([Request("whole", list(prompt), SamplingParams(max_new_tokens=new, **row), 77)])[
        "whole"
    ]
    cut = {
        f"cut{at}": Request(f"cut{at}", list(prompt), SamplingParams(max_new_tokens=new, **row), 77)
        for at in range(1, new)
    }
    settings = EngineSettings(bench.folder, dtype=bench.dtype, max_total_tokens=4096, max_running_requests=8)
    first = EngineCore(bench.model, settings, lambda request: None)
    for request in cut.values():
        first.submit(request)
    while first.step():
        for rid, request in cut.items():
            if request.finish is None and rid == f"cut{request.generated}":
                first.abort(rid, "cut")
    resumed = [
        Request(rid, list(request.tokens), SamplingParams(max_new_tokens=new - request.generated, **row), 77)
        for rid, request in cut.items()
    ]
    rest = bench.run(resumed)
    for at, (rid, request) in enumerate(cut.items(), start=1):
        assert request.finish is Finish.ABORT and request.generated == at
        tokens, logprobs = rest[rid]
        assert (request.output + tokens, request.logprobs + logprobs) == whole


def test_logprobs_are_those_of_a_plain_forward(bench):
    plain = AutoModelForCausalLM.from_pretrained(bench.folder, dtype=getattr(torch, bench.dtype))
    exact = bench.dtype == "float32"
    asked = requests()
    got = bench.run(asked)
    for request in requests():
        tokens, logprobs = got[request.rid]
        temperature = request.params.temperature or 1.0
        with torch.inference_mode():
            ids = torch.tensor([request.tokens + tokens])
            logits = plain(ids, use_cache=False).logits[0, len(request.tokens) - 1 : -1].float() / temperature
        want = torch.log_softmax(logits.double(), -1)[range(len(tokens)), tokens]
        off = (torch.tensor(logprobs).double() - want).abs()
        # bf16 rounds at every layer, and a router near a tie may choose another expert, so the median is bounded
        assert off.max() <= 1e-5 if exact else off.median() <= 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(64, 96), (576, 192), (96, 1003)])
def test_a_row_of_a_blocked_product_depends_on_itself_only(dtype, threads, shape):
    torch.manual_seed(0)
    x, w = torch.randn(200, shape[0]).to(dtype), torch.randn(shape[1], shape[0]).to(dtype)
    product = lambda block: F.linear(block, w)  # noqa: E731
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole = row_blocks(x, 32, product)
        for rows in ([0], [199], [5, 150, 7], list(range(64, 128)), list(range(199, -1, -1))):
            assert torch.equal(row_blocks(x[rows], 32, product), whole[rows])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(whole.double(), x.double() @ w.double().T, rtol=2e-2, atol=0.2)
