"""What engines say of themselves, in every known shape, and what keeps one from serving a run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.scripted_engine import RESET, Answer, ScriptedEngine
from turnout.core.errors import ConfigError, EngineError, EngineReplaced, Fault
from turnout.placement.real import RealClock
from turnout.serving.access import OPEN
from turnout.serving.address import Address
from turnout.serving.discovery import EngineInfo, ModelIdentity, NotUnderstood, info_of
from turnout.serving.external import ExternalEngines, Tenure, Wanted, external_plan, plans_of
from turnout.serving.roster import WorkerType

WHERE = Address("host1", 30000)
MODEL = ModelIdentity("llama", ("LlamaForCausalLM",), 256)
NAMES = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
OURS = {"engine": "turnout", "version": "turnout-0.1", "engine_id": "e", "pid": 7, "started_at": 1.5,
        "dtype": "bfloat16", "device": "cpu", "tp_size": 1, "model_path": "/m", "vocab_size": 256}  # fmt: skip
STOCK = {"version": "0.5.23", "model_path": "/m", "dtype": "bfloat16", "device": "cuda", "tp_size": 2, "pp_size": 2,
         "dp_size": 2, "ep_size": 4, "enable_dp_attention": True, "disaggregation_mode": "null",
         "disaggregation_bootstrap_port": 8998, "startup_time": {"load": 1.25}, "random_seed": 5,
         "port": 1}  # fmt: skip


def info(row: dict[str, Any], **more: Any) -> EngineInfo:
    return info_of(WHERE, row | more, NAMES)


def faults(found: EngineInfo) -> list[str]:
    return [fault.line() for fault in found.faults("bfloat16", MODEL)]


def test_an_embedded_engine_and_a_stock_one() -> None:
    ours, stock = info(OURS), info(STOCK)
    assert (ours.ours, ours.program, ours.ranks, ours.worker_type) == (
        True,
        "turnout-0.1",
        1,
        WorkerType.REGULAR,
    )
    assert (stock.ours, stock.program, stock.ranks) == (False, "sglang-0.5.23", 4)
    assert (stock.tp, stock.pp, stock.dp, stock.ep, stock.dp_attention) == (2, 2, 2, 4, True)
    assert stock.bootstrap_port is None, "an engine that does all of a request has no use for one"
    assert faults(ours) == faults(stock) == []
    assert info(OURS, port=9).identity == ours.identity != info(OURS, pid=8).identity
    assert info(STOCK, startup_time=None).identity == ""


@pytest.mark.parametrize(
    "row",
    [
        {"version": "0.4", "tensor_parallel_size": "2", "model_path": "/m", "dtype": "torch.bfloat16"},
        {"version": "0.4", "server_args": {"tp_size": 2, "model_path": "/m", "dtype": "bfloat16"}},
        {"version": "0.4", "model_path": "/m", "dtype": "bfloat16", "parallel_config": {"tp": 2, "pp": 1}},
    ],
    ids=["old names, texts", "nested", "parallel_config"],
)
def test_rtr_05_other_shapes(row: dict[str, Any]) -> None:
    found = info(row)
    assert (found.ranks, found.dtype, faults(found)) == (2, "bfloat16", [])


@pytest.mark.parametrize("answer", [[], "text", {"a": 1}, {"status": "ok", "model": "x"}])
def test_what_is_no_engine_is_told_with_what_came(answer: Any) -> None:
    with pytest.raises(NotUnderstood, match="host1:30000 answers, but not as SGLang does"):
        info_of(WHERE, answer, {})


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"dtype": "float16"}, "has the dtype float16, the run trains in bfloat16"),
        ({"dtype": "auto"}, "has the dtype auto"),
        ({"vocab_size": 512}, "its vocab_size is 512, that of --hf-checkpoint 256"),
        (
            {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": None},
            "names no bootstrap port",
        ),
        ({"encoder_only": True}, "is a encoder worker"),
    ],
)
def test_rtr_07_what_keeps_an_engine_out(row: dict[str, Any], why: str) -> None:
    (line,) = faults(info(OURS, **row))
    assert why in line and line.startswith("--rollout-external-engine-addrs = host1:30000: ")


def test_rtr_07_what_is_its_owners_business_keeps_no_engine_out() -> None:
    assert (
        faults(info(OURS, host="0.0.0.0", port=9, log_level="debug", mem_fraction_static=0.5, nnodes=3)) == []
    )


def test_another_model_is_told_by_type_and_architecture() -> None:
    found = info_of(WHERE, STOCK, {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    assert (
        len(faults(found)) == 2
        and "its model_type is qwen3, that of --hf-checkpoint llama" in faults(found)[0]
    )


def test_halves_of_a_pair() -> None:
    half = info(STOCK, disaggregation_mode="prefill")
    assert (half.worker_type, half.bootstrap_port, faults(half)) == (WorkerType.PREFILL, 8998, [])
    assert info(STOCK, disaggregation_mode="decode").worker_type is WorkerType.DECODE


def test_what_the_run_asks_of_embedded_engines_only() -> None:
    asked = (Fault("--option", "1", "no SGLang does it", "leave it out"),)
    assert list(info(OURS).faults("bfloat16", MODEL, asked)) == []
    (fault,) = info(STOCK).faults("bfloat16", MODEL, asked)
    assert fault.line() == "--option = 1: host1:30000 is sglang-0.5.23: no SGLang does it -> leave it out"


def test_a_file_of_addresses() -> None:
    plans = plans_of(["", "# none", "host1:1  # one", "http://host1:1/", "[0:0::1]:2"], "--file")
    assert [plan.engine_id for plan in plans] == ["host1:1", "[::1]:2"]
    with pytest.raises(ConfigError, match=r"2 faults(.|\n)*::1:2(.|\n)*has no path"):
        plans_of(["::1:2", "host:1", "http://host:1/v1"], "--file")


def test_two_names_of_one_engine_and_one_that_does_not_answer() -> None:
    async def main() -> None:
        engines = ExternalEngines(Wanted("bfloat16", MODEL, OPEN), RealClock(), Tenure("run", 1, 9.0, 3.0))
        async with ScriptedEngine() as engine:
            for path in ("/server_info", "/model_info"):
                engine.script(path, *[OURS | NAMES] * 3)
            here = external_plan(engine.address)
            made = await engines.connect(here, 20.0)
            assert made.client.plan.model_path == "/m" and made.process.pid is None
            assert engine.sent("/lease") == [{"run": "run", "incarnation": 1, "seconds": 9.0}]
            with pytest.raises(ConfigError, match=f"is the engine {here.engine_id} by another name"):
                await engines.connect(external_plan(Address("localhost", engine.address.port)), 20.0)
            await made.stop()
            assert engine.sent("/lease")[1]["seconds"] == 0, "it is given back"
            made = await engines.connect(external_plan(Address("localhost", engine.address.port)), 20.0)
            await made.stop()
        with pytest.raises(EngineError, match=f"did not answer at http://{here.engine_id} within"):
            await engines.connect(here, 0.1)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_two_names_of_one_engine_at_once_and_one_that_does_not_generate() -> None:
    async def main() -> None:
        engines = ExternalEngines(Wanted("bfloat16", MODEL, OPEN), RealClock(), Tenure("run", 1, 9.0, 3.0))
        async with ScriptedEngine(host="0.0.0.0") as engine:
            for path in ("/server_info", "/model_info"):
                engine.script(path, *[Answer(body=STOCK | NAMES)] * 3)
            engine.script("/health_generate", Answer(), Answer(400))
            names = [external_plan(Address(host, engine.port)) for host in ("127.0.0.1", "127.0.0.2")]
            results = await asyncio.gather(*(engines.connect(n, 20.0) for n in names), return_exceptions=True)
            (made,) = [one for one in results if not isinstance(one, BaseException)]
            (twin,) = [one for one in results if isinstance(one, BaseException)]
            assert isinstance(twin, ConfigError) and "by another name" in str(twin)
            await made.stop()
            with pytest.raises(EngineError):
                await engines.connect(names[0], 20.0)
            assert engines.found == {}

    asyncio.run(asyncio.wait_for(main(), 60))


def test_another_process_at_its_address_and_another_run_are_seen_by_the_next_probe() -> None:
    held = Answer(503, {"success": False, "message": "it works for run b"})

    async def main() -> None:
        engines = ExternalEngines(Wanted("bfloat16", MODEL, OPEN), RealClock(), Tenure("run", 1, 9.0, 3.0))
        async with ScriptedEngine() as ours, ScriptedEngine() as stock:
            ours.script("/server_info", Answer(body=OURS))
            stock.script("/server_info", *[Answer(body=STOCK)] * 2, Answer(body=STOCK | {"random_seed": 6}))
            for engine in (ours, stock):
                engine.script("/model_info", *[Answer(body=NAMES)] * 3)
            same = Answer(body=OURS)
            ours.script("/lease", same, same, Answer(body=OURS | {"pid": 8}), held)
            stock.script("/health_generate", Answer())
            stock.script("/health", Answer(), Answer(500), Answer(), Answer(500))
            made = [await engines.connect(external_plan(one.address), 20.0) for one in (ours, stock)]
            for one in made:
                await one.probe(5.0)
            with pytest.raises(EngineReplaced, match="another process answers"):
                await made[0].probe(5.0)
            with pytest.raises(EngineReplaced, match="it works for run b"):
                await made[0].probe(5.0)
            assert ours.sent("/lease")[1]["seconds"] == 3.0
            for fault in (EngineError, None, EngineError, EngineReplaced):  # asked only after a silence
                if fault is None:
                    await made[1].probe(5.0)
                else:
                    with pytest.raises(fault):
                        await made[1].probe(5.0)
            for one in made:
                await one.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_lease_is_renewed_while_weights_are_put_into_place_and_silence_is_not_judged() -> None:
    held = Answer(503, {"success": False, "message": "it works for run b"})

    async def main() -> None:
        engines = ExternalEngines(Wanted("bfloat16", MODEL, OPEN), RealClock(), Tenure("run", 1, 9.0, 3.0))
        async with ScriptedEngine() as engine:
            engine.script("/server_info", Answer(body=OURS))
            engine.script("/model_info", Answer(body=NAMES))
            engine.script("/lease", Answer(body=OURS), Answer(body=OURS), Answer(500), RESET, held)
            made = await engines.connect(external_plan(engine.address), 20.0)
            for _ in range(3):
                await made.keep(5.0)
            assert [row["seconds"] for row in engine.sent("/lease")] == [9.0, 3.0, 3.0, 3.0]
            with pytest.raises(EngineReplaced, match="it works for run b"):
                await made.keep(5.0)
            await made.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_engine_that_another_run_had_meanwhile_is_not_taken_for_the_one_before() -> None:
    """The lease ran out, another run loaded its weights and gave it back, and the next probe gets it again."""

    async def main() -> None:
        engines = ExternalEngines(Wanted("bfloat16", MODEL, OPEN), RealClock(), Tenure("run", 1, 9.0, 3.0))
        async with ScriptedEngine() as engine:
            engine.script("/server_info", Answer(body=OURS))
            engine.script("/model_info", Answer(body=NAMES))
            engine.script("/lease", *(Answer(body=OURS | {"term": term}) for term in (4, 4, 6)))
            made = await engines.connect(external_plan(engine.address), 20.0)
            await made.probe(5.0)
            with pytest.raises(EngineReplaced, match="another run had it"):
                await made.probe(5.0)
            await made.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_engine_that_works_for_another_run_is_waited_for_and_then_refused() -> None:
    held = Answer(503, {"success": False, "message": "it works for run b, which asked for it for 20 s more"})

    async def main() -> None:
        engines = ExternalEngines(Wanted("bfloat16", MODEL, OPEN), RealClock(), Tenure("run", 1, 9.0, 3.0))
        async with ScriptedEngine() as engine:
            for path, body in (("/server_info", OURS), ("/model_info", NAMES)):
                engine.script(path, *[Answer(body=body)] * 2)
            engine.script("/lease", held, Answer(body=OURS), Answer(), held)
            made = await engines.connect(external_plan(engine.address), 20.0)
            await made.stop()
            with pytest.raises(ConfigError, match=r"works for run b, .* for 20 s more -> end the other run"):
                await engines.connect(external_plan(engine.address), 0.5)

    asyncio.run(asyncio.wait_for(main(), 60))
