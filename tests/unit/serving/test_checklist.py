"""The verdicts of `turnout check`, of facts that real engines of tests/process don't show, and the stock probe."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError, EngineRefused, Fault
from turnout.placement.real import RealClock
from turnout.serving import router_launcher
from turnout.serving.access import Access
from turnout.serving.address import Address
from turnout.serving.checklist import engines
from turnout.serving.checklist.facts import Deployment, EngineFacts, HereFacts, ModelFacts, StoreFacts
from turnout.serving.checklist.folder import SEEN, Prober
from turnout.serving.checklist.lines import (
    Finding,
    Line,
    Result,
    exit_status,
    failed,
    proved,
    refused,
    render,
    unknown,
)
from turnout.serving.checklist.router import own_router, their_router
from turnout.serving.checklist.verdicts import CHECKS, lines
from turnout.serving.client import Attestation
from turnout.serving.discovery import ModelIdentity, info_of
from turnout.serving.roster import EnginePlan, Program

NAMED = ModelIdentity("llama", ("LlamaForCausalLM",), 320)
MODEL = ModelFacts(Path("m"), "", 10**6, NAMED, "a" * 64)
HERE = HereFacts(MODEL, StoreFacts(Path("w"), "", 10**9), None, ())
STOCK = {"version": "0.5.23", "dtype": "bfloat16", "device": "cpu", "tp_size": 1, "model_path": "m"}
HELD = Attestation("default", "", "label", {"x": "1"})


def run(**options: Any) -> RunConfig:
    return RunConfig.model_validate({"hf_checkpoint": "m", "prompt_data": "p", "num_rollout": 10, **options})


def stock(**said: Any) -> EngineFacts:
    row = {**STOCK, **said}
    info = info_of(Address("s", 1), row, {})
    return EngineFacts("s", said=info, info=row, weights=HELD, differs="", shared=proved("seen", "s"))


def told(engines: list[EngineFacts], here: HereFacts = HERE, **options: Any) -> dict[str, Line]:
    plans = tuple(EnginePlan(engine.name, program=Program.EXTERNAL) for engine in engines)
    return {line.name: line for line in lines(Deployment(run(**options), here, plans, tuple(engines)))}


def unlike(found: dict[str, Line], result: Result) -> list[str]:
    return [name for name, line in found.items() if line.result is result]


def test_a_stock_engine_is_proved_by_its_checksums() -> None:
    found = told([stock(), stock()])
    assert unlike(found, Result.PROVED) == list(found) and exit_status(list(found.values())) == 0


@pytest.mark.parametrize(
    ("engine", "options", "result", "names"),
    [
        (stock(version="0.4.1"), {}, Result.UNKNOWN, ["engine program", "update path"]),
        (stock(), {"deterministic": True}, Result.FAILED, ["engine program"]),
        (stock(engine="turnout", delta_formats=[]), {"deterministic": True}, Result.FAILED, []),
        (stock(dtype="auto"), {}, Result.FAILED, ["engine dtype"]),
        (stock(dtype="half"), {}, Result.FAILED, ["engine dtype"]),
        (replace(stock(), differs="1 of its 2 parameters differ: x"), {}, Result.FAILED, ["engine model"]),
        (replace(stock(), weights=None, weights_fault="gone"), {}, Result.UNKNOWN, ["engine model"]),
        (replace(stock(), shared=unknown("busy", "s")), {}, Result.UNKNOWN, ["shared directory"]),
        (stock(), {"update_weight_mode": "delta"}, Result.FAILED, ["update path"]),
        (stock(), {"update_weight_transport": "tensor"}, Result.FAILED, ["update path"]),
        (replace(stock(), near=True), {"update_weight_transport": "tensor"}, Result.FAILED, []),
        (stock(disaggregation_mode="decode"), {}, Result.FAILED, ["worker types"]),
        (EngineFacts("down", fault="refused"), {}, Result.FAILED, ["addresses"]),
        (EngineFacts("web", strange="no engine"), {}, Result.FAILED, ["engine program"]),
        (stock(encoder_only=True), {}, Result.FAILED, ["worker types"]),
        (stock(vocab_size=7), {}, Result.FAILED, ["engine model"]),
        (
            stock(engine="turnout", delta_formats=["turnout-weights/1"], quantization="int8"),
            {"update_weight_mode": "delta"},
            Result.FAILED,
            ["update path"],
        ),
    ],
)
def test_one_fault_is_one_line(
    engine: EngineFacts, options: dict[str, Any], result: Result, names: list[str]
) -> None:
    assert unlike(told([engine], **options), result) == names


def test_a_half_of_a_pair_beside_whole_engines() -> None:
    prefill = stock(disaggregation_mode="prefill", disaggregation_bootstrap_port=8998)
    decode = stock(disaggregation_mode="decode")
    assert told([prefill, decode])["worker types"].result is Result.PROVED
    assert told([prefill, decode, stock()])["worker types"].result is Result.FAILED


def test_an_engine_of_an_earlier_run_is_not_called_wrong() -> None:
    held = Attestation("v000003-0123456789abcdef", "b" * 64, "memory")
    engine = replace(stock(engine="turnout"), weights=held, differs=None)
    assert told([engine])["engine model"].result is Result.UNKNOWN
    fresh = replace(engine, weights=replace(held, label="default"))
    assert told([fresh])["engine model"].result is Result.FAILED


EPOCHS = {"num_rollout": None, "num_epoch": 1}
KEEP = {"update_weight_disk_keep_files": True}
DELTA = {"update_weight_mode": "delta"}
LATER = {"eval_mode": "checkpoint", "eval_prompt_data": "e", "eval_interval": 2}


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({}, 6, 6),  # two committed, one being written
        ({"num_rollout": 1}, 2, 2),
        (KEEP, 20, 20),
        (KEEP | {"update_weights_interval": 4}, 6, 6),
        (DELTA, 4, 8),  # one in full, ten of a tenth; anchors, of which as many stay as of full versions
        ({"dtype": "float32"}, 12, 12),
        (EPOCHS, 2, 6),
        (EPOCHS | KEEP, 2, None),
        (EPOCHS | DELTA, 2, None),
        (LATER, 6, 16),  # five points beside the newest
        (LATER | {"eval_interval": None}, 6, 6),
        (LATER | {"eval_mode": "dedicated", "eval_model": "e", "eval_interval": 5}, 6, 10),
        (LATER | EPOCHS, 2, None),
        (LATER | DELTA, 4, 18),
        ({"save_interval": 2}, 6, 10),  # a resume may go on from the last two
    ],
)
def test_what_the_store_needs(options: dict[str, Any], least: int, most: int | None) -> None:
    def found(free: int) -> Result:
        here = replace(HERE, store=StoreFacts(Path("w"), "", free))
        return told([], here, **options)["disk space"].result

    assert found(least * 10**6 - 1) is Result.FAILED
    assert found(10**15) is (Result.UNKNOWN if most is None else Result.PROVED)
    if most is not None:
        assert found(most * 10**6) is Result.PROVED
        assert found(most * 10**6 - 1) is (Result.FAILED if most == least else Result.UNKNOWN)


def test_gpus_are_counted_up_to_the_last_that_an_engine_lies_on() -> None:
    plans = tuple(EnginePlan(f"e{at}", program=Program.SGLANG, devices=(at,)) for at in (1, 2))
    for there, result in ((3, Result.PROVED), (2, Result.FAILED), (None, Result.UNKNOWN)):
        found = lines(Deployment(run(engine="sglang"), replace(HERE, gpus=there), plans))
        assert {line.name: line.result for line in found}["devices"] is result


def test_lines_tell_the_worst_first_and_what_to_do() -> None:
    line = Line("name", "claim", (proved("good", "a"), failed("bad", "b"), unknown("dark", "c")), "mend it")
    text = render([line])
    assert [text.index(word) for word in ("bad", "dark", "good", "mend")] == sorted(
        text.index(word) for word in ("bad", "dark", "good", "mend")
    )
    assert exit_status([replace(line, findings=line.findings[::2])]) == 3 and exit_status([line]) == 1
    told_well = Line("name", "claim", (proved("good"),), "mend it")
    assert "mend" not in render([told_well]) and told_well.row()["remedy"] == ""
    [options] = refused(ConfigError([Fault("--a", "1", "no", "b"), Fault("--c", "", "nor", "b")]))
    assert len(options.findings) == 2 and options.remedy == "b"


def test_other_models_are_looked_at_too() -> None:
    assert told([], replace(HERE, others=(failed("broken", "reward"),)))["model"].result is Result.FAILED


def test_names_of_lines_are_keys() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)


class Stock:
    """A stock engine as far as a path is concerned: `root` is what it sees, `mute` whether it tells at all."""

    engine_id, version = "s", "default"

    def __init__(self, blind: bool = False, mute: bool = False, busy: int = 0) -> None:
        self.blind, self.mute, self.busy = blind, mute, busy
        self.loaded: list[list[str]] = []
        self.sums = {"x": "1"}

    async def load_report(self, deadline_s: float) -> tuple[int, int, float]:
        return self.busy, 0, 0.0

    async def attest(self, deadline_s: float) -> Attestation:
        return Attestation("default", "", "label", dict(self.sums))

    async def load_from_disk(self, folder: str, label: str, deadline_s: float, flush: bool = True) -> None:
        path = Path(folder)
        files = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
        if files:
            self.loaded.append(files)
            return
        there = path.is_dir() and not self.blind
        said = "no" if self.mute else f"{SEEN} with `{path}`" if there else "Repo id must be in the form"
        raise EngineRefused("s", "update", "default", f"/update_weights_from_disk answered 400: {said}")


@pytest.mark.parametrize(
    ("engine", "result"),
    [
        (Stock(), Result.PROVED),
        (Stock(blind=True), Result.FAILED),
        (Stock(busy=1), Result.UNKNOWN),
    ],
)
def test_a_stock_engine_tells_an_empty_folder_from_none(tmp_path: Path, engine: Any, result: Result) -> None:
    found = asyncio.run(Prober(tmp_path, RealClock(), 1.0).probe(engine, True, ""))
    assert found.result is result and not engine.loaded and list(tmp_path.iterdir()) == []


def test_the_deep_probe_loads_what_it_serves(tmp_path: Path) -> None:
    model, shared, engine = tmp_path / "model", tmp_path / "shared", Stock()
    for folder in (model, shared):
        folder.mkdir()
    (model / "model.safetensors").write_text("w")
    prober = Prober(shared, RealClock(), 1.0, model)
    found = asyncio.run(prober.probe(engine, True, "it serves v000003"))  # type: ignore[arg-type]
    assert found.result is Result.UNKNOWN and "it serves v000003" in found.how and not engine.loaded
    found = asyncio.run(prober.probe(engine, True, ""))  # type: ignore[arg-type]
    assert found.result is Result.PROVED and engine.loaded == [["model.safetensors"]]
    engine.sums = {}
    found = asyncio.run(prober.probe(engine, True, ""))  # type: ignore[arg-type]
    assert found.result is Result.UNKNOWN and list(shared.iterdir()) == []


class Live(Stock):
    """A stock engine that is asked for all that it is."""

    address = Address("127.0.0.1", 1)

    def __init__(self, label: str, sums: dict[str, str]) -> None:
        super().__init__()
        self.label, self.sums = label, sums

    async def server_info(self, deadline_s: float) -> dict[str, Any]:
        return STOCK

    async def model_info(self, deadline_s: float) -> dict[str, Any]:
        return {}

    async def attest(self, deadline_s: float) -> Attestation:
        return Attestation(self.label, "", "label", dict(self.sums))

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("label", "differs", "sums", "result"),
    [
        ("default", "", {"x": "1"}, Result.PROVED),
        ("v000003-0123456789abcdef", "", {"x": "1"}, Result.UNKNOWN),
        ("default", "1 of its 2 parameters differ: x", {"x": "1"}, Result.UNKNOWN),
        ("default", "", {}, Result.UNKNOWN),
    ],
)
def test_only_an_engine_that_holds_the_checkpoint_loads_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    label: str,
    differs: str,
    sums: dict[str, str],
    result: Result,
) -> None:
    monkeypatch.setattr(engines, "_difference", lambda *_: differs)
    model, shared, engine = tmp_path / "model", tmp_path / "shared", Live(label, sums)
    for folder in (model, shared):
        folder.mkdir()
    (model / "model.safetensors").write_text("w")
    clock = RealClock()
    look = engines.Look(clock, 1.0, Prober(shared, clock, 1.0, model), model)
    [facts] = asyncio.run(look.at_all([lambda stock: engine]))  # type: ignore[list-item, return-value]
    assert facts.shared is not None and facts.shared.result is result
    assert bool(engine.loaded) == (result is Result.PROVED)


WORKER = {"id": "1", "url": "http://e:1", "worker_type": "regular", "is_healthy": True}


async def served(body: dict[str, Any]) -> tuple[Finding, ...]:
    """What is found of a router that lists this."""

    async def workers(request: web.Request) -> web.Response:
        known = request.headers.get("Authorization") == "Bearer sesame"
        return web.json_response(body, status=200 if known else 401)

    app = web.Application()
    app.add_routes([web.get("/workers", workers)])
    async with TestServer(app) as server:
        return await their_router(Address("127.0.0.1", server.port or 0), RealClock(), 5.0, Access("sesame"))


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ({"workers": []}, Result.PROVED),
        ({"other": 1}, Result.FAILED),
        ({"workers": [WORKER]}, Result.UNKNOWN),
        ({"workers": [WORKER | {"is_healthy": False}]}, Result.UNKNOWN),
        ({"workers": [WORKER | {"is_healthy": False, "status": "draining"}]}, Result.PROVED),
    ],
)
def test_a_router_of_somebody_else(body: dict[str, Any], result: Result) -> None:
    [found] = asyncio.run(served(body))
    assert found.result is result
    router = replace(HERE, router=(found,))
    assert told([], router)["router"].result is result and "router" not in told([])


def test_routers_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", probe.getsockname()[1])  # bound, and nobody listens
        [found] = asyncio.run(their_router(address, RealClock(), 5.0))
    assert found.result is Result.FAILED
    monkeypatch.setitem(router_launcher.MODULES, "smg", "no_such_router")
    launch = router_launcher.RouterLaunch("router", "smg", "manual", {}, 1.0, Path())
    [found] = asyncio.run(own_router(launch, RealClock()))
    assert found.result is Result.FAILED and "can't be run" in found.how
