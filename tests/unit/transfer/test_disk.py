"""A weight update from the trainer's tensors to attested engines: a real store, scripted engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_engine import HANG, RESET, Answer, ScriptedEngine
from tests.unit.rollout.parts import Log
from tests.weight_files import assets, model
from turnout.core.errors import DeadlineExceeded, WeightError
from turnout.core.events import VersionAborted, VersionAttested, VersionCommitted, VersionPublished
from turnout.core.version import WeightVersion
from turnout.placement.real import DiskStore, RealClock
from turnout.transfer.disk import DiskTransport
from turnout.transfer.updater import Updater
from turnout.weights.digest import root_of
from turnout.weights.store import WeightStore
from turnout.weights.verify import verify

BASE = WeightVersion(0, 0, root_of(model(0)))
PREPARE, ACTIVATE = "/prepare_weights", "/activate_weights"


class Deployment:
    """Two engines that serve the base weights, a store, an updater."""

    def __init__(
        self, folder: Path, engines: list[ScriptedEngine], clock: Any = None, keep_all: bool = False
    ) -> None:
        clock = clock or RealClock()
        self.engines, self.log, self.folder = engines, Log(), folder / "w"
        self.store = WeightStore(self.folder, DiskStore(), assets(folder / "assets"), 200)
        self.store.open("run", 0, BASE.root)
        for engine in engines:
            engine.root = BASE.root
        self.clients = [engine.client(clock) for engine in engines]
        self.transport = DiskTransport(self.store, clock, keep_all)
        self.updater = Updater(self.transport, self.clients, self.log, clock)

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
        assert d.updater.fenced == set()
        assert [(engine.label, engine.root) for engine in d.engines] == [(version.label, version.root)] * 2
        assert [client.version for client in d.clients] == [version.label] * 2
        assert [type(event) for event in d.log.events] == [
            VersionPublished, VersionAttested, VersionAttested, VersionCommitted,
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
    ("a request in flight", busy_with_a_request, "1 requests in flight"),
    ("an unknown load", lambda e: setattr(e, "load", {"busy": False}), "not understood"),
]


@pytest.mark.parametrize(("how", "says"), [row[1:] for row in FAILURES], ids=[row[0] for row in FAILURES])
def test_wgt_01_one_engine_of_two_fails(
    how: Callable[[ScriptedEngine], None], says: str, tmp_path: Path
) -> None:
    """Aborted as a whole: both engines are fenced, the old version stays current, the folder is never it."""

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
        assert d.updater.fenced == {"e0", "e1"}
        (aborted,) = d.log.of(VersionAborted)
        assert aborted.version == WeightVersion(0, 1, root_of(model(1))).label
        assert says in aborted.reason
        assert d.log.of(VersionCommitted) == []
        assert d.folders() == ["weight_v000001"]

    on(tmp_path, use)


def test_an_engine_with_a_request_in_flight_is_not_touched(tmp_path: Path) -> None:
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
        assert d.updater.fenced == {"e0", "e1"}

    on(tmp_path, use, clock=Impatient())


def test_weights_that_cannot_be_written_abort_before_any_engine_is_asked(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()
        before = [len(engine.calls) for engine in d.engines]
        update = d.updater.begin(lambda: [*model(1), *model(1)], 1, 20.0)
        with pytest.raises(WeightError, match="exported twice"):
            await update.publish()
        assert [len(engine.calls) for engine in d.engines] == before
        assert d.updater.fenced == set()
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


def test_a_deadline_of_the_whole_update_covers_writing(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.adopt()

        class Late(RealClock):
            async def within(self, seconds: float, what: str, work: Any) -> Any:
                await asyncio.ensure_future(work)
                raise DeadlineExceeded(what, seconds)

        d.transport.clock = Late()
        with pytest.raises(WeightError, match=r"waited .* for the weights to be written"):
            await d.update(1)
        assert len(d.log.of(VersionAborted)) == 1
        assert d.updater.current == BASE

    on(tmp_path, use)
