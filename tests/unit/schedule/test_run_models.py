"""Models beside the one that is trained: who is handed out, what must have stayed, whose log-probs a batch gets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_engine import Answer, ScriptedEngine
from tests.unit.rollout.parts import Log, QuickClock
from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError, DeadlineExceeded, EngineDead, EngineError, WeightError
from turnout.core.events import ModelAttested
from turnout.core.types import Prompt, TrainBatch, TrainSample, Trajectory
from turnout.core.version import WeightVersion
from turnout.core.waits import Waits
from turnout.placement.real import RealClock
from turnout.rollout.rewards import RewardRunner
from turnout.rollout.tokenizer import load_tokenizer
from turnout.schedule.dedicated import DedicatedEngines, Following
from turnout.schedule.engine_lives import Around, Care, Probes
from turnout.schedule.frozen import FrozenModels
from turnout.schedule.reference import Reference, TaughtTrainer
from turnout.schedule.run_engines import RunEngines
from turnout.schedule.run_models import RunModels, check_models, check_tokens
from turnout.serving.client import Attestation, EngineClient
from turnout.serving.external import Elsewhere
from turnout.serving.launcher import Engine
from turnout.serving.models import Models, model_url
from turnout.serving.roster import EnginePlan, WorkerType
from turnout.train.model_tokenizer import byte_tokenizer, save_tokenizer
from turnout.weights.routing import Held

OLD, NEW = "1" * 32, "2" * 32


def on(use: Callable[[ScriptedEngine, ScriptedEngine], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with ScriptedEngine("judge-0") as one, ScriptedEngine("judge-1") as two:
            return await asyncio.wait_for(use(one, two), 20)

    return asyncio.run(main())


def judge(engine: ScriptedEngine) -> EngineClient:
    client = engine.client()
    client.plan = EnginePlan(engine.engine_id, model="judge", updated=False)
    return client


def attests(engine: ScriptedEngine, *roots: str) -> None:
    """Each of its attestations computes one of these."""
    engine.root = roots[0]
    for root in roots:
        engine.script("/weights_checker", Answer(body={"success": True, "per_engine_checksum": root}))


def test_engines_of_a_model_take_turns_and_a_dead_one_is_left_out() -> None:
    async def use(one: ScriptedEngine, two: ScriptedEngine) -> Any:
        frozen = FrozenModels(Log(), 5.0)
        run = Models({"default": list, "judge": lambda: frozen.serving("judge")})
        for engine in (one, two):
            attests(engine, OLD)
            await frozen.joins(judge(engine))
        took_turns = [model_url(run, "judge", "/generate") for _ in range(4)]
        assert took_turns == [f"{engine.address.url}/generate" for engine in (one, two, one, two)]
        frozen.lost("judge-0")
        assert {model_url(run, "judge") for _ in range(3)} == {two.address.url}
        frozen.lost("judge-1")
        with pytest.raises(EngineDead, match="no engine of the model 'judge' is up"):
            model_url(run, "judge")
        with pytest.raises(ConfigError, match="one of default, judge"):
            model_url(run, "jugde")

    on(use)


def test_a_reward_that_names_run_is_given_the_models() -> None:
    async def use(one: ScriptedEngine, _two: ScriptedEngine) -> Any:
        client = judge(one)

        def plain(prompt: str, response: str, label: Any, run: Models, **metadata: Any) -> float:
            return float(model_url(run, "judge", "/x") == f"{client.address.url}/x" and metadata == {"n": 1})

        async def later(prompt: str, response: str, label: Any, *, run: Models) -> float:
            return plain(prompt, response, label, run, n=1)

        def of_the_data(prompt: str, response: str, label: Any, **metadata: Any) -> float:
            return float(metadata["run"])

        made = replace(Trajectory.unbegun(0), text="r")
        scores = []
        for reward in (plain, later, of_the_data):
            runner = RewardRunner(reward, RealClock())
            runner.models = Models({"judge": lambda: [client]})
            scores.append((await runner.score(Prompt("0", (1,), "p", None, {"run": 7, "n": 1}), made)).value)
        return scores

    assert on(use) == [1.0, 1.0, 7.0]


def test_a_frozen_model_that_changed_is_an_error_that_names_both_digests() -> None:
    async def use(one: ScriptedEngine, two: ScriptedEngine) -> Any:
        log = Log()
        frozen = FrozenModels(log, 5.0)
        attests(one, OLD, OLD, NEW)
        await frozen.joins(judge(one))
        frozen.lost("judge-0")
        await frozen.joins(judge(one))  # its next life
        with pytest.raises(
            WeightError, match=f"judge-0 of the frozen model 'judge' holds {NEW}.* held {OLD}"
        ):
            await frozen.stayed()
        two.root = ""  # as an engine that has only a name for its weights
        with pytest.raises(WeightError, match="--trust-label"):
            await frozen.joins(judge(two))
        assert "judge-1" not in {client.engine_id for client in frozen.serving("judge")}
        return [(event.engine, event.root, event.level) for event in log.of(ModelAttested)]

    assert on(use) == [("judge-0", root, "memory") for root in (OLD, OLD, NEW)]


def configured(folder: Path, **given: Any) -> RunConfig:
    path = folder / "groups.yaml"
    path.write_text(GROUPS)
    required = {"hf_checkpoint": "m", "prompt_data": "p", "sglang_config": str(path)}
    return RunConfig.model_validate(required | given)


def test_the_next_life_of_a_frozen_engine_is_asked_once_it_attests(tmp_path: Path) -> None:
    async def use(one: ScriptedEngine, _two: ScriptedEngine) -> None:
        nothing: Any = None
        engines = RunEngines(nothing, Log(), QuickClock(), Waits(lambda: 0.0))
        models = RunModels(configured(tmp_path), engines, nothing, Log(), QuickClock())
        attests(one, OLD)
        one.script("/weight_version", Answer(503), Answer(500))
        assert await models.again(judge(one)) == "serves the model 'judge' again"
        assert models.models.engine("judge").engine_id == "judge-0"
        one.script("/weight_version", Answer(503), Answer(503), Answer(503))
        with pytest.raises(EngineDead, match=r"it does not attest, asked 3 times, the last with: .*503"):
            await models.again(judge(one))

    on(use)


def test_the_trained_model_is_no_half_of_a_pair(tmp_path: Path) -> None:
    async def use(one: ScriptedEngine, two: ScriptedEngine) -> None:
        nothing: Any = None
        clients = {engine.engine_id: engine.client() for engine in (one, two)}

        async def start(plan: EnginePlan) -> Engine:
            client = clients[plan.engine_id]
            client.plan, client.holds = plan, Held(WeightVersion(1, 3, OLD), 0)
            return Engine(Elsewhere(), client)

        engines = RunEngines(start, Log(), QuickClock(), Waits(lambda: 0.0))
        run = RunModels(configured(tmp_path), engines, nothing, Log(), QuickClock()).models
        await engines.start(EnginePlan("judge-0", worker_type=WorkerType.DECODE))
        with pytest.raises(ConfigError, match=r"model = actor: its engines are halves of pairs.*--router"):
            model_url(run, "actor")
        await engines.start(EnginePlan("judge-1"))
        assert {model_url(run, "actor") for _ in range(3)} == {two.address.url}

    on(use)


def test_who_serves_may_change_while_a_reward_in_a_thread_asks() -> None:
    frozen = FrozenModels(Log(), 5.0, trust_label=True)

    class Ends:
        engine_id = "judge-0"

        async def attest(self, _deadline_s: float) -> Attestation:
            return Attestation("default", "", "label")

        @property
        def plan(self) -> EnginePlan:
            frozen.lost("judge-0")
            return EnginePlan("judge-0", model="judge", updated=False)

    ends: Any = Ends()

    async def main() -> None:
        await frozen.joins(ends)

    asyncio.run(main())
    assert frozen.serving("judge") == [ends]
    assert frozen.serving("judge") == []


def test_a_life_that_does_not_join_ends_and_another_is_started() -> None:
    async def use(one: ScriptedEngine, _two: ScriptedEngine) -> list[str]:
        joined, said = asyncio.Event(), list[str]()

        async def start(_plan: EnginePlan) -> Engine:
            return Engine(Elsewhere(), judge(one))

        async def joins(client: EngineClient) -> None:
            if len(said) == 1:
                raise EngineDead(client.engine_id, "attest", "none", "it does not attest")
            joined.set()

        def lost(fault: EngineDead, _then: str) -> None:
            said.append(fault.reason)

        async def work() -> None:
            await joined.wait()

        engines = RunEngines(start, Log(), QuickClock(), Waits(lambda: 0.0))
        around = Around(lambda: "rollout", lost, joins, lambda _: "", lambda _: False)
        one.script("/health", Answer(500))
        await engines.start(judge(one).plan)
        await engines.during(work(), Care(Probes(0.05, 5.0, failures=1), 3, {}), around)
        return said

    assert on(use)[1:] == ["it does not attest"]


class Versions:
    """A transport's way for one engine to catch up: the scripted engine then holds the version."""

    def __init__(self, *engines: ScriptedEngine) -> None:
        self.engines, self.loaded = {engine.engine_id: engine for engine in engines}, []

    async def catch_up(self, version: WeightVersion, engine: EngineClient, deadline_s: float) -> Any:
        self.loaded.append((engine.engine_id, version.counter))
        scripted = self.engines[engine.engine_id]
        scripted.label, scripted.root = version.label, version.root
        return await engine.attest(deadline_s)


def test_dedicated_engines_load_what_is_evaluated_and_serve_nothing_else() -> None:
    async def use(one: ScriptedEngine, two: ScriptedEngine) -> Any:
        transport: Any = Versions(one, two)
        none = DedicatedEngines(Following(transport, RealClock(), 0.5, restarted=False))
        with pytest.raises(WeightError, match="no engine that evaluates is left"):
            await none.serve(WeightVersion(0, 1, NEW))
        engines = DedicatedEngines(Following(transport, RealClock(), 0.5))
        with pytest.raises(DeadlineExceeded, match="an engine that evaluates to be up"):
            await engines.serve(WeightVersion(0, 1, NEW))
        one.root = two.root = OLD
        engines.joins(judge(one))
        engines.joins(judge(two))
        await engines.serve(WeightVersion(0, 0, OLD))
        assert transport.loaded == [], "they were started with it"
        assert one.label == two.label == WeightVersion(0, 0, OLD).label
        await engines.serve(WeightVersion(0, 2, NEW))
        assert [client.engine_id for client in engines.routable()] == ["judge-0", "judge-1"]
        engines.lost("judge-0")
        assert [client.engine_id for client in engines.routable()] == ["judge-1"]
        two.script("/weight_version", Answer(500), Answer(500))
        with pytest.raises(EngineError):
            await engines.serve(WeightVersion(0, 3, OLD))
        with pytest.raises(WeightError):
            engines.routable()
        return transport.loaded

    assert on(use) == [("judge-0", 2), ("judge-1", 2)]


SAMPLE = TrainSample("g", (5, 6), (7, 8, 9), (-1.0,) * 3, (1, 0, 1), (1.0,) * 3)


def test_every_sample_that_trains_gets_the_references_log_probs() -> None:
    """An engine that is busy or gone is no end of it; an answer of other tokens is."""

    async def use(one: ScriptedEngine, two: ScriptedEngine) -> Any:
        def scored(body: dict[str, Any]) -> Any:
            ids, start = body["input_ids"], body["logprob_start_len"]
            rows = [[None if at == start else -float(at), ids[at], None] for at in range(start, len(ids))]
            return {"text": "", "meta_info": {"input_token_logprobs": rows}}

        one.on_generate = two.on_generate = scored
        one.script("/generate", Answer(503))
        two.script("/generate", Answer(ending="reset"))
        engines = [judge(one), judge(two)]
        reference = Reference(Models({"judge": lambda: engines}), "judge", RealClock(), 5.0)
        masked = replace(SAMPLE, loss_mask=(0, 0, 0))
        batch = TrainBatch(0, "v", (SAMPLE, masked, replace(SAMPLE, prompt_ids=(5,))))
        found = await reference.logprobs(batch)
        two.on_generate = one.on_generate = lambda body: {
            "meta_info": {"input_token_logprobs": [[None, 6, None], [-1.0, 4, None]]}
        }
        with pytest.raises(EngineError, match="0 good ones of 3 log-probs"):
            await reference.logprobs(batch)
        return found

    assert on(use) == [(-2.0, -3.0, -4.0), (), (-1.0, -2.0, -3.0)]


GROUPS = """
sglang:
  - {name: actor, server_groups: [{worker_type: regular, num_gpus: 1}]}
  - {name: judge, model_path: other, server_groups: [{worker_type: regular, num_gpus: 1}]}
  - {name: apart, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 1}]}
  - {name: stock, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 1, engine: sglang}]}
"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ref_model": "judge", "eval_model": "apart"}, ""),
        (
            {"ref_model": "actor"},
            "--ref-model = actor: no engines of a model of this name.* one of judge, apart, stock",
        ),
        ({"eval_model": "none"}, "--eval-model = none: no engines of a model of this name"),
        (
            {"eval_model": "judge"},
            "--eval-model = judge: is other, and evaluates versions of m -> leave its model",
        ),
        ({"eval_model": "stock"}, "--eval-model = stock: .* a stock SGLang does not know -> .* embedded"),
        ({"ref_model": "judge", "sglang_config": None}, "give --sglang-config with update_weights: false"),
    ],
)
def test_options_name_models_that_are_there(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    config = configured(tmp_path, **given)
    if not said:
        check_models(config)
        return
    with pytest.raises(ConfigError, match=said):
        check_models(config)


def test_a_model_that_scores_the_policys_tokens_knows_them_by_the_same_ids(tmp_path: Path) -> None:
    other = byte_tokenizer()
    other.add_tokens(["<call>"])
    for name, tokenizer in (("same", byte_tokenizer()), ("other", other)):
        save_tokenizer(tokenizer, tmp_path / name)
    own = load_tokenizer(tmp_path / "same")
    for flag in ("ref_model", "opd_teacher"):
        config = configured(tmp_path, **{flag: "judge"})  # whose model_path is `other`
        check_tokens(config, own, {"other": tmp_path / "same"})
        with pytest.raises(ConfigError, match="the tokenizer of other gives other ids"):
            check_tokens(config, own, {"other": tmp_path / "other"})
    check_tokens(configured(tmp_path, opd_teacher="apart"), own, {})  # the policy's own checkpoint


def test_the_trainer_gets_the_teachers_log_probs_and_tells_how_far_it_is() -> None:
    """Of trained tokens alone; a sample that trains none is not asked about."""

    class Trainer:
        async def train(self, batch: TrainBatch) -> dict[str, float]:
            self.batch = batch
            return {"loss": 1.0}

    async def scores(self: Reference, batch: TrainBatch) -> list[tuple[float, ...]]:
        return [(-2.0, -7.0, -3.0), ()]

    trainer = Trainer()
    teacher = Reference(Models({}), "judge", RealClock(), 5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reference, "logprobs", scores)
        batch = TrainBatch(0, "v", (SAMPLE, replace(SAMPLE, loss_mask=(0, 0, 0))))
        told = asyncio.run(TaughtTrainer(trainer, teacher).train(batch))
    assert told == {"loss": 1.0, "opd_kl": ((-1.0 + 2.0) + (-1.0 + 3.0)) / 2}
    assert [sample.teacher for sample in trainer.batch.samples] == [(-2.0, -7.0, -3.0), ()]
