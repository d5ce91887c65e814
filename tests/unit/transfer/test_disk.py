"""A weight update from the trainer's tensors to attested engines: a real store, scripted engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_engine import HANG, RESET, Answer, ScriptedEngine
from tests.unit.rollout.parts import Log
from tests.weight_files import assets, model
from turnout.core.errors import WeightError
from turnout.core.events import (
    EngineFenced,
    VersionAborted,
    VersionAttested,
    VersionCommitted,
    VersionPrepared,
    VersionPublished,
)
from turnout.core.version import WeightVersion
from turnout.placement.real import DiskStore, RealClock
from turnout.serving.weights_client import OnUpdate
from turnout.transfer.disk import DiskTransport
from turnout.transfer.fleet import TRIES_MAX
from turnout.transfer.updater import UpdatePolicy, Updater
from turnout.weights.digest import root_of
from turnout.weights.store import WeightStore
from turnout.weights.verify import verify

BASE = WeightVersion(0, 0, root_of(model(0)))
PREPARE, ACTIVATE = "/prepare_weights", "/activate_weights"


class Deployment:
    """Two engines that serve the base weights, a store, an updater."""

    def __init__(
        self,
        folder: Path,
        engines: list[ScriptedEngine],
        clock: Any = None,
        keep_all: bool = False,
        policy: UpdatePolicy | None = None,
    ) -> None:
        clock = clock or RealClock()
        self.engines, self.log, self.folder = engines, Log(), folder / "w"
        self.store = WeightStore(self.folder, DiskStore(), assets(folder / "assets"), 200)
        self.store.open("run", 0, BASE.root)
        for engine in engines:
            engine.root = BASE.root
        self.clients = [engine.client(clock) for engine in engines]
        self.transport = DiskTransport(self.store, clock, keep_all)
        self.updater = Updater(self.transport, self.clients, self.log, clock, policy)

    async def adopt(self) -> None:
        await self.updater.adopt(BASE, 20.0)

    async def update(self, step: int, deadline_s: float = 20.0, seed: int | None = None) -> WeightVersion:
        update = self.updater.begin(lambda: model(step if seed is None else seed), step, deadline_s)
        await update.publish()
        await update.prepare()
        return await update.commit()

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name.startswith("weight_v"))


class Impatient(RealClock):
    """Gives up on the load of weights by e1 at once, and has time for everything else."""

    async def within(self, seconds: float, what: str, work: Any) -> Any:
        return await super().within(0.05 if "e1" in what and ACTIVATE in what else seconds, what, work)


def on(folder: Path, use: Callable[[Deployment], Awaitable[Any]], **more: Any) -> Any:
    async def main() -> Any:
        async with ScriptedEngine("e0") as one, ScriptedEngine("e1") as two:
            deployment = Deployment(folder, [one, two], **more)
            return await asyncio.wait_for(use(deployment), 30)

    return asyncio.run(main())


def test_a_request_that_was_just_cut_is_waited_for(tmp_path: Path) -> None:
    """An engine sees a moment later that the connection was closed."""

    async def use(d: Deployment) -> None:
        await d.adopt()
        idle = d.engines[1].load
        busy_with_a_request(d.engines[1])
        asyncio.get_running_loop().call_later(0.1, setattr, d.engines[1], "load", idle)
        await d.update(1)
        assert len(d.engines[1].sent(ACTIVATE)) == 1

    on(tmp_path, use)


FLAGS = {
    OnUpdate.DRAIN: {"abort_all_requests": False, "flush_cache": True},
    OnUpdate.ABORT: {"abort_all_requests": True, "flush_cache": True},
    OnUpdate.RETRACT: {"abort_all_requests": False, "flush_cache": True},
    OnUpdate.CONTINUE: {"abort_all_requests": False, "flush_cache": False},
}


@pytest.mark.parametrize("policy", OnUpdate)
def test_what_an_update_does_to_requests_in_flight(policy: OnUpdate, tmp_path: Path) -> None:
    """Ours is told with the activation; a stock engine, told by its pause, goes on whatever came."""
    busy = {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 0}]}

    async def use(d: Deployment) -> None:
        async def checked(folder: Path, deadline_s: float) -> None:
            """The tests' weights hold NaN, which a stock engine is not given."""

        d.transport.on_update, d.transport._check = policy, checked  # type: ignore[method-assign]
        await d.adopt()
        stock = d.engines[1]
        d.clients[1].stages = False  # type: ignore[misc]
        for engine in d.engines:
            engine.load = busy
        if policy is OnUpdate.DRAIN:
            with pytest.raises(WeightError, match="requests are in flight on e0, e1"):
                await d.update(1)
            assert d.engines[0].sent(ACTIVATE) == []
            return
        await d.update(1)
        (sent,) = d.engines[0].sent(ACTIVATE)
        assert sent == {"prepared_id": sent["prepared_id"], **FLAGS[policy]}
        calls = [(call.path, call.body) for call in stock.calls]
        at = next(i for i, (path, _) in enumerate(calls) if path == "/update_weights_from_disk")
        mode = {"abort": "abort", "retract": "retract", "continue": "in_place"}[policy]
        assert calls[at - 1] == ("/pause_generation", {"mode": mode})
        assert calls[at][1]["flush_cache"] is FLAGS[policy]["flush_cache"]
        assert [path for path, _ in calls].count("/continue_generation") == 1
        assert calls[-1] == ("/continue_generation", {})
        assert not [path for path, _ in calls if path == ACTIVATE]
        stock.script("/update_weights_from_disk", Answer(500, b"boom"))
        with pytest.raises(WeightError):
            await d.update(2)
        assert stock.calls[-1].path == "/continue_generation", "it does not stay paused"

    on(tmp_path, use, policy=UpdatePolicy(drained=policy is OnUpdate.DRAIN))


def test_the_base_is_adopted_when_every_engine_attests_it(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        assert d.updater.current == BASE
        assert (
            [engine.label for engine in d.engines]
            == [client.version for client in d.clients]
            == [BASE.label] * 2
        )
        assert d.log.events == [
            VersionAttested("e0", BASE.label, BASE.root, "memory"),
            VersionAttested("e1", BASE.label, BASE.root, "memory"),
            VersionCommitted(BASE.label),
        ]
        assert [engine.aborted_by_default for engine in d.engines] == [0, 0]

    on(tmp_path, use)


def test_a_base_of_other_weights_is_refused_by_engine(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        d.engines[1].root = "f" * 32
        with pytest.raises(
            WeightError, match=f"engine e1 loaded weights {'f' * 32}, the trainer holds {BASE.root}"
        ):
            await d.adopt()
        assert d.updater.current is None
        assert d.log.of(VersionCommitted) == []
        assert d.engines[1].label == "default"

    on(tmp_path, use)


def test_a_base_that_is_only_named_is_refused(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        d.engines[0].level = "label"
        with pytest.raises(WeightError, match="engine e0 can only name its weights"):
            await d.adopt()
        assert d.updater.current is None

    on(tmp_path, use)


def test_an_update(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        d.log.events.clear()
        version = await d.update(1)
        assert version == d.updater.current == WeightVersion(0, 1, root_of(model(1)))
        assert d.updater.versions_committed == 1
        assert d.updater.fleet.fenced == set()
        assert [(engine.label, engine.root) for engine in d.engines] == [(version.label, version.root)] * 2
        assert [client.version for client in d.clients] == [version.label] * 2
        assert [type(event) for event in d.log.events] == [
            VersionPublished, VersionPrepared, VersionPrepared, VersionAttested, VersionAttested, VersionCommitted,
        ]  # fmt: skip
        published = d.log.events[0]
        assert (published.counter, published.root, published.step) == (1, version.root, 1)
        assert published.required == ["e0", "e1"]
        assert published.bytes == sum(verify(d.folder / "weight_v000001").files.values())
        assert all(Path(engine.sent(PREPARE)[0]["model_path"]).is_absolute() for engine in d.engines)
        assert [engine.aborted_by_default for engine in d.engines] == [0, 0]

    on(tmp_path, use)


def test_publishing_changes_nothing_for_any_engine(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        before = [len(engine.calls) for engine in d.engines]
        update = d.updater.begin(lambda: model(1), 1, 20.0)
        await update.publish()
        assert [len(engine.calls) for engine in d.engines] == before
        assert d.updater.current == BASE
        assert d.folders() == ["weight_v000001"]

    on(tmp_path, use)


def wrong_root(engine: ScriptedEngine) -> None:
    engine.script("/weight_version", Answer(body={"version": "v", "root": "f" * 32, "level": "memory"}))


def only_named(engine: ScriptedEngine) -> None:
    engine.level = "label"


def busy_with_a_request(engine: ScriptedEngine) -> None:
    engine.load = [{"num_running_reqs": 1, "num_waiting_reqs": 0}]


FAULTS: list[tuple[str, Answer, str]] = [
    ("success false", Answer(200, {"success": False, "message": "checksum"}), "checksum"),
    ("no success", Answer(200, {}), "{}"),
    ("a list", Answer(200, [True]), "[True]"),
    ("400", Answer(400, {"message": "not flushed"}), "not flushed"),
    ("500", Answer(500, b"boom"), "boom"),
    ("503", Answer(503, b"busy"), "busy"),
    ("no JSON", Answer(200, b"ok"), "no JSON"),
    ("dead", RESET, "e1"),
]


def answers(path: str, answer: Answer) -> Callable[[ScriptedEngine], None]:
    return lambda engine: engine.script(path, answer)


FAILURES: list[tuple[str, Callable[[ScriptedEngine], None], str]] = [
    *((f"prepare, {name}", answers(PREPARE, answer), says) for name, answer, says in FAULTS),
    *((f"activate, {name}", answers(ACTIVATE, answer), says) for name, answer, says in FAULTS),
    ("no set", answers(PREPARE, Answer(200, {"success": True})), "named no set"),
    ("wrong root", wrong_root, "f" * 32),
    ("only named", only_named, "can only name its weights"),
    ("no attestation", lambda e: e.script("/weight_version", Answer(404, {})), "404"),
    ("a request in flight", busy_with_a_request, "requests are in flight on e1"),
    ("an unknown load", lambda e: setattr(e, "load", {"busy": False}), "not understood"),
]


def fenced_by(name: str) -> set[str]:
    """An engine that was not told to activate still serves what it served."""
    if name == "a request in flight":
        return set()
    return {"e1"} if name.startswith(("prepare", "no set", "an unknown load")) else {"e0", "e1"}


@pytest.mark.parametrize(
    ("how", "says", "fenced"),
    [(how, says, fenced_by(name)) for name, how, says in FAILURES],
    ids=[row[0] for row in FAILURES],
)
def test_wgt_01_one_engine_of_two_fails(
    how: Callable[[ScriptedEngine], None], says: str, fenced: set[str], tmp_path: Path
) -> None:
    """Aborted as a whole: engines of unknown weights are fenced, the old version stays current, the folder is never
    it."""

    async def use(d: Deployment) -> None:
        await d.adopt()
        d.log.events.clear()
        how(d.engines[1])
        with pytest.raises(WeightError, match="weight update aborted") as caught:
            await d.update(1)
        assert says in str(caught.value)
        assert "e1" in str(caught.value)
        assert d.updater.current == BASE
        assert d.updater.versions_committed == 0
        assert d.updater.fleet.fenced == fenced == {event.engine for event in d.log.of(EngineFenced)}
        if "e0" in fenced:
            with pytest.raises(WeightError, match="no engine may serve"):
                d.updater.fleet.routable()
        else:
            assert d.clients[0] in d.updater.fleet.routable()
        (aborted,) = d.log.of(VersionAborted)
        assert aborted.version == WeightVersion(0, 1, root_of(model(1))).label
        assert says in aborted.reason
        assert d.log.of(VersionCommitted) == []
        assert d.folders() == ["weight_v000001"]

    on(tmp_path, use)


def test_wgt_28_an_engine_with_a_request_in_flight_is_not_touched(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        busy_with_a_request(d.engines[1])
        with pytest.raises(WeightError):
            await d.update(1)
        assert d.engines[1].sent(ACTIVATE) == []
        assert d.engines[1].root == BASE.root

    on(tmp_path, use)


def test_after_a_failed_update_the_next_one_has_another_number_and_clears_the_old_folder(
    tmp_path: Path,
) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        d.engines[1].script(ACTIVATE, Answer(500, b"boom"))
        with pytest.raises(WeightError):
            await d.update(1)
        version = await d.update(1)
        assert (version.counter, version.root) == (2, root_of(model(1)))
        assert d.folders() == ["weight_v000002"]

    on(tmp_path, use)


def test_an_engine_that_never_answers_is_cut_off(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        d.engines[1].script(ACTIVATE, HANG)
        with pytest.raises(WeightError, match=r"waited .* for engine e1 to answer /activate_weights"):
            await d.update(1)
        assert d.updater.current == BASE
        assert d.updater.fleet.fenced == {"e0", "e1"}

    on(tmp_path, use, clock=Impatient())


def test_weights_that_cannot_be_written_abort_before_any_engine_is_asked(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        before = [len(engine.calls) for engine in d.engines]
        update = d.updater.begin(lambda: [*model(1), *model(1)], 1, 20.0)
        with pytest.raises(WeightError, match="exported twice"):
            await update.publish()
        assert [len(engine.calls) for engine in d.engines] == before
        assert d.updater.fleet.fenced == set()
        assert len(d.log.of(VersionAborted)) == 1
        assert d.log.of(VersionPublished) == []
        assert d.folders() == []

    on(tmp_path, use)


def test_a_full_disk_is_a_weight_error_that_aborts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()

        def full(*_: object) -> bool:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(DiskStore, "create_once", full)
        with pytest.raises(WeightError, match="No space left"):
            await d.update(1)
        assert len(d.log.of(VersionAborted)) == 1
        assert d.updater.current == BASE

    on(tmp_path, use)


def test_the_two_newest_committed_versions_stay(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        kept = []
        for number in range(1, 5):
            await d.update(number)
            kept.append([int(name[8:]) for name in d.folders()])
        assert kept == [[1], [1, 2], [2, 3], [3, 4]]
        for name in d.folders():
            verify(d.folder / name)

    on(tmp_path, use)


def test_keep_files_keeps_all(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        for number in range(1, 5):
            await d.update(number)
        assert len(d.folders()) == 4

    on(tmp_path, use, keep_all=True)


def test_equal_weights_are_a_new_version_of_the_same_content(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        version = await d.update(1, seed=0)
        assert (version.root, version.counter) == (BASE.root, 1)
        assert d.engines[0].label == version.label

    on(tmp_path, use)


def test_writing_past_the_deadline_is_never_current_and_the_next_update_waits_for_it(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        blocked, real = threading.Event(), d.store.publish

        def slow(tensors: Any, step: int) -> Any:
            assert blocked.wait(20)
            return real(tensors, step)

        d.store.publish = slow  # type: ignore[method-assign]
        with pytest.raises(WeightError, match=r"waited .* for the weights to be written"):
            await d.update(1, 0.05)
        d.store.publish = real  # type: ignore[method-assign]
        with pytest.raises(WeightError, match="earlier work to end before the weights to be written"):
            await d.update(2, 0.05)
        assert d.folders() == []
        asyncio.get_running_loop().call_later(0.05, blocked.set)
        version = await d.update(3)
        assert version == d.updater.current == WeightVersion(0, 2, root_of(model(3)))
        assert len(d.log.of(VersionAborted)) == 2 and d.updater.versions_committed == 1
        assert [event.counter for event in d.log.of(VersionPublished)] == [2]

    on(tmp_path, use)


def test_wgt_23_wgt_32_with_enough_engines_left_the_run_goes_on_and_the_next_update_heals(
    tmp_path: Path,
) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        d.engines[1].script(ACTIVATE, Answer(500, b"boom"))
        first = await d.update(1)
        assert d.updater.current == first and d.updater.fleet.fenced == {"e1"}
        assert d.updater.fleet.routable() == [d.clients[0]]
        assert [(event.engine, event.version) for event in d.log.of(EngineFenced)] == [("e1", first.label)]
        second = await d.update(2)
        assert d.engines[1].root == second.root and d.updater.fleet.fenced == set()
        assert d.updater.fleet.routable() == d.clients

    on(tmp_path, use, policy=UpdatePolicy(min_engines=1))


def test_too_few_engines_left_abort_and_say_so(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        for engine in d.engines:
            engine.script(PREPARE, Answer(500, b"boom"))
        with pytest.raises(WeightError, match=r"engines left: 0, needed: 1: engine e1 .*boom"):
            await d.update(1)
        assert d.updater.current == BASE

    on(tmp_path, use, policy=UpdatePolicy(min_engines=1))


def test_an_engine_that_fails_again_and_again_is_left_out_until_it_joins(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        for step in range(1, TRIES_MAX + 1):
            d.engines[1].script(PREPARE, Answer(500, b"boom"))
            await d.update(step)
        asked = len(d.engines[1].calls)
        version = await d.update(TRIES_MAX + 1)
        assert len(d.engines[1].calls) == asked and d.updater.fleet.fenced == {"e1"}
        assert await d.updater.join(d.clients[1], 10.0)
        assert d.engines[1].root == version.root and d.updater.fleet.routable() == d.clients
        again = await d.update(TRIES_MAX + 2)
        assert [engine.root for engine in d.engines] == [again.root] * 2

    on(tmp_path, use, policy=UpdatePolicy(min_engines=1))


def test_a_joiner_waits_for_the_update_under_way_and_loads_what_became_current(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        async with ScriptedEngine("e2") as late:
            update = d.updater.begin(lambda: model(1), 1, 20.0)
            await update.publish()
            joining = asyncio.ensure_future(d.updater.join(late.client(), 10.0))
            await update.prepare()
            assert late.calls == [] and not joining.done()
            version = await update.commit()
            assert await joining
            assert late.root == version.root and late.label == version.label
            assert [client.engine_id for client in d.updater.fleet.routable()] == ["e0", "e1", "e2"]
            (published,) = d.log.of(VersionPublished)
            assert published.required == ["e0", "e1"]

    on(tmp_path, use)


def test_wgt_32_a_joiner_waits_for_the_update_that_follows_a_failed_one_as_well(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        async with ScriptedEngine("e2") as late:
            first = d.updater.begin(lambda: model(1), 1, 20.0)
            await first.publish()
            joining = asyncio.ensure_future(d.updater.join(late.client(), 10.0))
            await asyncio.sleep(0.05)
            assert not joining.done()
            await first.abandon("the disk is full")
            second = d.updater.begin(lambda: model(2), 2, 20.0)
            await second.publish()
            await asyncio.sleep(0.05)
            assert late.calls == [] and not joining.done()
            await second.prepare()
            version = await second.commit()
            assert await joining and late.root == version.root

    on(tmp_path, use)


def test_a_joiner_that_cannot_load_is_not_routable(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        await d.update(1)
        async with ScriptedEngine("e2") as late:
            late.script("/update_weights_from_disk", Answer(400, {"message": "not flushed"}))
            assert not await d.updater.join(late.client(), 10.0)
            assert d.updater.fleet.fenced == {"e2"} and d.updater.fleet.routable() == d.clients

    on(tmp_path, use)


def test_wgt_29_an_engine_that_ends_during_an_update_is_fenced_by_its_death(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        update = d.updater.begin(lambda: model(1), 1, 20.0)
        await update.publish()
        d.updater.lost("e1", "killed by SIGKILL")
        await update.prepare()
        version = await update.commit()
        assert d.updater.fleet.fenced == {"e1"} and d.engines[1].root == BASE.root
        assert d.updater.current == version

    on(tmp_path, use, policy=UpdatePolicy(min_engines=1))


@pytest.mark.parametrize("answer", [RESET, Answer(500, b"no such call")])
def test_wgt_29_an_engine_that_ends_by_a_control_call_is_fenced_alone_and_named(
    answer: Answer, tmp_path: Path
) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        d.engines[1].script(ACTIVATE, answer)
        version = await d.update(1)
        assert d.updater.fleet.fenced == {"e1"} and d.updater.current == version
        (fenced,) = d.log.of(EngineFenced)
        assert fenced.engine == "e1" and "engine e1 failed in phase update" in fenced.reason
        assert ACTIVATE in fenced.reason

    on(tmp_path, use, policy=UpdatePolicy(min_engines=1))


def test_a_trusted_label_commits_and_another_does_not(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        for engine in d.engines:
            engine.level, engine.label = "label", BASE.label
        await d.adopt()
        version = await d.update(1)
        assert d.updater.current == version
        assert {event.level for event in d.log.of(VersionAttested)} == {"label"}
        d.engines[0].script(
            "/weight_version", Answer(200, {"version": version.label, "root": "", "level": "label"})
        )
        with pytest.raises(WeightError, match=f"says that it holds {version.label}, not v000002"):
            await d.update(2)

    on(tmp_path, use, policy=UpdatePolicy(trust_label=True))
