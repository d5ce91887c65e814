"""What stands between HTTP and the core: settings, stop strings, the lock on updates."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.engine_models import add_tokenizer, config, make_model
from turnout.core.errors import ConfigError, ModelError, WeightError
from turnout.core.types import Finish
from turnout.engine import updates
from turnout.engine.core import Activated, Attested
from turnout.engine.loop import ComputeThread
from turnout.engine.model import load_model
from turnout.engine.request_machine import Request
from turnout.engine.server import Server
from turnout.engine.settings import EngineSettings
from turnout.engine.text import StopWatch, response_text
from turnout.placement.parent import Owner
from turnout.protocol.sglang import SamplingParams

MODEL = Path("model")


def test_settings_name_every_fault():
    with pytest.raises(ConfigError) as refused:
        EngineSettings(MODEL, dtype="int8", threads=0, host="0.0.0.0", max_step_tokens=1, row_block=1)
    assert len(refused.value.faults) == 5
    assert EngineSettings(MODEL, host="0.0.0.0", admin_token="x").loopback is False
    for host in ("127.0.0.1", "::1", "localhost", "127.8.9.1"):
        assert EngineSettings(MODEL, host=host).loopback


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 2},
            "sliding_window",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
            | {"partial_rotary_factor": 0.5},
            "partial_rotary_factor",
        ),
    ],
)
def test_a_model_that_would_be_served_wrongly_is_refused(tmp_path, change, where):
    config("qwen3").save_pretrained(tmp_path)
    row = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(row))
    with pytest.raises(ModelError) as refused:
        load_model(EngineSettings(tmp_path))
    assert [fault.where for fault in refused.value.faults] == [where]


def test_a_longer_context_than_the_models_is_refused(tmp_path):
    make_model(tmp_path, "llama")
    with pytest.raises(ModelError, match="context_length = 513: the model's own is 512"):
        load_model(EngineSettings(tmp_path, context_length=513))
    assert load_model(EngineSettings(tmp_path, max_total_tokens=100)).shape.context_length == 96


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(add_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize(
    ("text", "stops", "cut"),
    [
        ("one STOP two", ("STOP",), "one STOP"),
        ("one ST OP STO STOP!", ("STOP",), "one ST OP STO STOP"),
        ("a\u00e9\u4e16\U0001f600b", ("\U0001f600",), "a\u00e9\u4e16\U0001f600"),
        ("aab", ("ab", "aab"), "aab"),
        ("nothing here", ("x",), None),
        ("x", ("", "x"), "x"),
    ],
)
def test_a_stop_string_ends_at_the_token_that_completes_it(tokenizer, text, stops, cut):
    watch = StopWatch(tokenizer, stops, skip_special=True)
    ids = tokenizer(text)["input_ids"]
    found = next((n for n in range(1, len(ids) + 1) if watch.push(ids[n - 1 : n])), None)
    assert found == (None if cut is None else len(cut.encode()))


def test_the_text_of_a_response_is_cut_at_its_stop(tokenizer):
    request = Request("r", [5], SamplingParams(stop=("END",)), 0, frozenset({2}))
    request.tokens += tokenizer("one END")["input_ids"]
    request.finish = Finish.STOP
    assert response_text(tokenizer, request) == "one "
    request.finish = Finish.LENGTH
    assert response_text(tokenizer, request) == "one END"
    ended = Request("r", [5], SamplingParams(skip_special_tokens=False), 0, frozenset({2}))
    ended.tokens += [*tokenizer("one")["input_ids"], 2]
    ended.finish = Finish.STOP
    assert response_text(tokenizer, ended) == "one"
    assert response_text(None, ended) == ""


class SlowCompute:
    """The part of a ComputeThread that an update needs; `stage_folder` waits until it is let go."""

    def __init__(self) -> None:
        self.settings = EngineSettings(MODEL)
        self.go, self.entered = threading.Event(), threading.Event()
        self.rounded: list[tuple[Path, bool]] = []
        self.core = SimpleNamespace(
            weights=SimpleNamespace(stage_folder=self.stage_folder, audit=lambda _stop: -1),
            fenced=None,
            runner=None,
        )
        self.attested = Attested("w", "a" * 32, 0.0)
        self.fault: WeightError | None = None

    def stage_folder(self, folder: Path, may_round: bool = False) -> Any:
        self.rounded.append((folder, may_round))
        self.entered.set()
        assert self.go.wait(10)
        if self.fault is not None:
            raise self.fault
        return SimpleNamespace(manifest=None, root="a" * 32, nothing=False)

    async def do(self, work: Any, deadline_s: float) -> Any:
        return Activated(Attested("w", "a" * 32, 0.0), 3, 0.0)


def test_wgt_26_a_second_update_is_refused_while_one_runs_and_not_after():
    async def scenario() -> None:
        compute = SlowCompute()
        async with TestClient(TestServer(Server(cast("ComputeThread", compute)).app())) as client:
            body = {"model_path": "/x", "weight_version": "w"}
            first = asyncio.create_task(client.post("/update_weights_from_disk", json=body))
            await asyncio.to_thread(compute.entered.wait, 10)
            second = await client.post("/update_weights_from_disk", json=body)
            row = await second.json()
            assert second.status == 409 and not row["success"] and "/x is under way" in row["message"]
            compute.go.set()
            assert (await first).status == 200 and (await (await first).json())["num_paused_requests"] == 3
            compute.fault = WeightError("torn")
            third = await client.post("/update_weights_from_disk", json=body)
            assert third.status == 400 and (await third.json()) == {"success": False, "message": "torn"}
            compute.fault = None
            assert (await client.post("/update_weights_from_disk", json=body)).status == 200

    asyncio.run(scenario())


def test_the_folder_that_an_engine_began_with_is_read_again_as_it_was_then():
    """fp32 values are rounded, which no other update may have done."""

    async def scenario() -> list[tuple[Path, bool]]:
        compute = SlowCompute()
        compute.go.set()
        async with TestClient(TestServer(Server(cast("ComputeThread", compute)).app())) as client:
            for folder in (MODEL, Path("/x")):
                body = {"model_path": str(folder), "weight_version": "w"}
                assert (await client.post("/update_weights_from_disk", json=body)).status == 200
        return compute.rounded

    assert asyncio.run(scenario()) == [(MODEL.resolve(), True), (Path("/x"), False)]


def test_an_update_goes_on_when_its_caller_hangs_up():
    async def scenario() -> None:
        compute = SlowCompute()
        server = Server(cast("ComputeThread", compute))
        async with TestClient(TestServer(server.app(), handler_cancellation=True)) as client:
            first = asyncio.create_task(client.post("/update_weights_from_disk", json={"model_path": "/x"}))
            await asyncio.to_thread(compute.entered.wait, 10)
            first.cancel()
            await asyncio.sleep(0)
            assert (await client.post("/update_weights_from_disk", json={"model_path": "/y"})).status == 409
            compute.go.set()
            for _ in range(1000):
                if server.updates.updates.holder is None:
                    break
                await asyncio.sleep(0.01)
            assert (await client.post("/update_weights_from_disk", json={"model_path": "/y"})).status == 200

    asyncio.run(scenario())


def test_wgt_23_an_engine_that_is_adopted_ends_what_the_controller_before_had_begun(monkeypatch):
    monkeypatch.setattr(updates, "Staging", lambda _, whole: SimpleNamespace())

    async def scenario() -> None:
        server = Server(cast("ComputeThread", SlowCompute()), Owner(0, linger_s=60.0))
        groups = server.updates._groups
        groups._groups |= {"turnout-a-1": object(), "turnout-b-1": object()}
        async with TestClient(TestServer(server.app())) as client:
            assert (await client.post("/begin_weight_update", json={})).status == 200
            assert (await client.post("/begin_weight_update", json={})).status == 409
            assert (await client.post("/adopt", json={"pid": os.getpid()})).status == 200
            assert (await client.post("/begin_weight_update", json={})).status == 200
        assert groups.names == []

    asyncio.run(scenario())
