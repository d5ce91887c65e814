"""Deltas from the trainer's tensors to attested engines, by disk and by group: engines that really apply them."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.delta_engine import DeltaEngine, WiredGroup
from tests.scripted_engine import HANG, RESET, Answer
from tests.unit.rollout.parts import Log
from tests.weight_files import as_rows, assets, finite_model, touched
from turnout.core.errors import InvariantBroken, WeightError
from turnout.core.events import VersionPublished
from turnout.core.version import WeightVersion
from turnout.placement.real import DiskStore, RealClock
from turnout.transfer.delta_base import DeltaBase
from turnout.transfer.delta_disk import DeltaDiskTransport
from turnout.transfer.equal import EqualityChecked
from turnout.transfer.snapshot import Snapshot
from turnout.transfer.updater import Updater
from turnout.weights.codecs.registry import CODECS
from turnout.weights.digest import root_of
from turnout.weights.manifest import DELTA, FULL
from turnout.weights.store import WeightStore
from turnout.weights.tensors import HostTensor, converted

WAYS = ["disk", "group"]
BUCKET = 64  # bytes: a version of finite_model travels in several


@dataclass
class Deployment:
    engines: list[DeltaEngine]
    base: DeltaBase
    transport: Any
    updater: Updater
    store: WeightStore
    log: Log

    async def update(self, tensors: list[HostTensor], step: int = 1) -> WeightVersion:
        update = self.updater.begin(lambda: tensors, step, 20.0)
        await update.publish()
        await update.prepare()
        return await update.commit()

    def holds(self, tensors: list[HostTensor]) -> bool:
        return all(as_rows(engine.tensors.values()) == as_rows(tensors) for engine in self.engines)


def few(tensors: list[HostTensor], seed: int) -> list[HostTensor]:
    """Some elements changed: a delta is worth it."""
    return touched(
        touched(tensors, "embed", seed % 128, 0x3C00 + seed), "router", seed % 32, 0x3E000000 + seed
    )


def on(
    folder: Path,
    way: str,
    use: Callable[[Deployment], Awaitable[None]],
    *,
    loaded: list[HostTensor] | None = None,
    exported: list[HostTensor] | None = None,
    encoding: str = "indices",
    keep_all: bool = True,
    equal: bool = True,
) -> None:
    loaded = finite_model() if loaded is None else loaded

    async def main() -> None:
        async with DeltaEngine("e0") as one, DeltaEngine("e1") as two:
            clock, log = RealClock(), Log()
            store = WeightStore(folder / "w", DiskStore(), assets(folder / "assets"), 1 << 20)
            snapshot = Snapshot(loaded, loaded if exported is None else exported)
            version = WeightVersion(0, 0, snapshot.root)
            store.open("run", 0, version.root)
            base = DeltaBase(snapshot, version, 20)
            if way == "disk":
                transport: Any = DeltaDiskTransport(store, clock, base, encoding, keep_all)
            else:
                transport = WiredGroup(store, clock, BUCKET, base)
                transport.wired = [one, two]
            for engine in (one, two):
                engine.hold(loaded)
            clients = [engine.client(clock) for engine in (one, two)]
            checked = EqualityChecked(transport, clock) if equal else transport
            updater = Updater(checked, clients, log, clock)
            await updater.adopt(version, 20.0)
            deployment = Deployment([one, two], base, transport, updater, store, log)
            await asyncio.wait_for(use(deployment), 60)

    asyncio.run(main())


@pytest.mark.parametrize("way", WAYS)
def test_engines_hold_the_export_after_every_delta(way: str, tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        tensors = finite_model()
        for step in range(1, 5):
            tensors = few(tensors, step)
            version = await d.update(tensors, step)
            assert version == d.updater.current == d.base.version == WeightVersion(0, step, root_of(tensors))
            assert d.holds(tensors)
            assert {engine.label for engine in d.engines} == {version.label}
        assert d.base.snapshot.root == root_of(tensors)
        full = sum(tensor.nbytes for tensor in tensors)
        published = d.log.of(VersionPublished)
        assert all(0 < event.bytes < full * 3 for event in published) and len(published) == 4
        if way == "disk":
            assert [m.kind for m in d.store.versions()] == [DELTA] * 4
        else:
            assert d.engines[0].sent("/update_weights_from_distributed")[-1]["load_format"] == "delta_bucket"

    on(tmp_path, way, use)


@pytest.mark.parametrize("full", [False, True])
def test_train_steps_may_go_on_between_publishing_and_the_commit(full: bool, tmp_path: Path) -> None:
    """The base moves to what was published, whatever the export is by then."""

    async def use(d: Deployment) -> None:
        tensors, d.base.first_in_full = finite_model(), full
        for step in (1, 2):
            first = tensors = few(tensors, step)
            now = [first]
            update = Updater.begin(d.updater, lambda now=now: now[0], step, 20.0)
            await update.publish()
            assert d.transport.detached
            now[0] = few(first, 9)  # trained
            await update.prepare()
            version = await update.commit()
            assert d.base.version == version and d.base.snapshot.root == root_of(first)
            assert d.holds(first)

        assert [m.kind for m in d.store.versions()] == [FULL if full else DELTA, DELTA]

    on(tmp_path, "disk", use, equal=False)


@pytest.mark.parametrize("encoding", CODECS)
def test_every_encoding(encoding: str, tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        tensors = finite_model()
        for step in range(1, 4):
            tensors = few(tensors, step)
            await d.update(tensors, step)
            assert d.holds(tensors)
        # of so small a model a delta with tables is not worth it, once the first has shown that
        assert {m.encoding for m in d.store.versions() if m.kind == DELTA} == {encoding}

    on(tmp_path, "disk", use, encoding=encoding)


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_did_not_change_are_a_version_too(way: str, tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        version = await d.update(finite_model())
        assert (version.counter, version.root) == (1, root_of(finite_model()))
        assert {engine.label for engine in d.engines} == {version.label}
        tensors = few(finite_model(), 3)
        assert (await d.update(tensors)).counter == 2 and d.holds(tensors)

    on(tmp_path, way, use)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "answer", [Answer(500, b"boom"), Answer(200, {"success": False, "message": "no"}), RESET, HANG]
)
def test_wgt_01_after_a_failure_the_same_changes_go_with_the_next_version(
    way: str, answer: Answer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the answer: the base stays, and what the failed version held is in the next one."""
    paths = {"disk": "/activate_weights", "group": "/end_weight_update"}

    async def use(d: Deployment) -> None:
        first, second = few(finite_model(), 1), few(few(finite_model(), 1), 2)
        d.engines[1].script(paths[way], answer)
        update = d.updater.begin(lambda: first, 1, 1.0 if answer is HANG else 20.0)
        await update.publish()
        await update.prepare()
        with pytest.raises(WeightError, match="weight update aborted"):
            await update.commit()
        assert d.base.version == d.updater.current and d.base.version.counter == 0
        assert d.base.snapshot.root == root_of(finite_model())
        assert "deltas go on from v000000" in caplog.text
        for engine in d.engines:  # as engines are healed: they catch up, or are told their old weights again
            engine.hold(finite_model())
        version = await d.update(second, 2)
        assert version.counter == 2 and d.holds(second)
        if way == "disk":
            newest = d.store.versions()[-1]
            assert newest.base == WeightVersion(0, 0, root_of(finite_model()))
            assert sum(entry.count for entry in newest.tensors.values()) == 4

    with caplog.at_level(logging.WARNING):
        on(tmp_path, way, use)


def test_an_engine_that_fell_behind_catches_up_by_what_the_store_holds(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        start = d.base.version
        tensors = few(finite_model(), 1)
        version = await d.update(tensors)
        d.engines[1].hold(finite_model())  # started again from its checkpoint
        client = d.engines[1].client(RealClock())
        found = await d.transport.catch_up(version, client, 20.0)
        assert (found.root, found.label) == (version.root, version.label) and d.holds(tensors)
        assert d.engines[1].sent("/update_weights_from_disk")[-1]["load_format"] == "delta"
        assert await d.transport.catch_up(start, client, 20.0) is None  # the base has no folder

    on(tmp_path, "disk", use)


@pytest.mark.parametrize("way", WAYS)
def test_wgt_10_nothing_is_published_of_weights_with_a_nan(way: str, tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        broken = touched(few(finite_model(), 1), "router", 3, 0x7FC00000)
        with pytest.raises(WeightError, match="router has 1 values that are NaN or infinite"):
            await d.update(broken)
        assert d.store.newest_counter() == 0 and d.log.of(VersionPublished) == []
        assert d.engines[0].sent("/prepare_weights") == d.engines[0].sent("/begin_weight_update") == []
        assert d.updater.fleet.fenced == set()
        tensors = few(finite_model(), 2)
        assert (await d.update(tensors)).counter == 1 and d.holds(tensors)

    on(tmp_path, way, use)


@pytest.mark.parametrize("way", WAYS)
def test_a_version_of_which_all_changed_goes_in_full(way: str, tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        await d.update(finite_model(1))
        assert d.holds(finite_model(1))
        tensors = few(finite_model(1), 5)
        await d.update(tensors, 2)
        assert d.holds(tensors)
        formats = [body["load_format"] for body in d.engines[0].sent("/update_weights_from_distributed")]
        if way == "disk":
            assert [m.kind for m in d.store.versions()] == [FULL, DELTA]
        else:
            assert formats[0] == "flattened_bucket" and formats[-1] == "delta_bucket"

    on(tmp_path, way, use)


@pytest.mark.parametrize("way", WAYS)
def test_engines_that_loaded_narrower_values_get_the_first_version_whole(way: str, tmp_path: Path) -> None:
    loaded = finite_model()
    wide = [converted(tensor, "F32") for tensor in loaded]

    async def use(d: Deployment) -> None:
        tensors = wide
        for step in range(1, 4):
            tensors = touched(tensors, "embed", step, 0x3F800000 + step)
            await d.update(tensors, step)
            assert d.holds(tensors)
        if way == "disk":
            assert [m.kind for m in d.store.versions()] == [FULL, DELTA, DELTA]

    on(tmp_path, way, use, loaded=loaded, exported=wide)


def test_a_group_sends_the_whole_to_an_engine_that_holds_something_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(d: Deployment) -> None:
        d.engines[1].hold(finite_model(9))
        tensors = few(finite_model(), 1)
        await d.update(tensors)
        assert d.holds(tensors)
        assert "is sent whole: engine e1 holds" in caplog.text

    with caplog.at_level(logging.INFO):
        on(tmp_path, "group", use)


def test_changes_that_arrive_wrong_are_not_put_into_place(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        d.transport.breaks_at = 1
        with pytest.raises(WeightError, match=r"another root|positions"):
            await d.update(few(finite_model(), 1))
        assert d.holds(finite_model())

    on(tmp_path, "group", use)


@pytest.mark.parametrize("way", WAYS)
def test_a_delta_applied_wrongly_is_found_in_the_live_tensors(way: str, tmp_path: Path) -> None:
    """The engine attests what it should hold; only --check-weight-update-equal reads what it does hold."""

    async def use(d: Deployment) -> None:
        engine = d.engines[1]
        hold = engine.hold

        def one_off(tensors: Any) -> None:
            hold(tensors)
            engine.tensors["norm"].bits[2] ^= 1

        engine.hold = one_off
        with pytest.raises(WeightError, match=r"engine e1 holds .* after the update, the trainer"):
            await d.update(few(finite_model(), 1))
        assert d.base.version.counter == 0

    on(tmp_path, way, use)


def test_every_so_many_versions_the_base_is_digested_anew() -> None:
    tensors = finite_model()
    base = DeltaBase(Snapshot(tensors, tensors), WeightVersion(0, 0, root_of(tensors)), 2)
    base.committed(WeightVersion(0, 1, base.survey(lambda: tensors).root))
    damaged = next(delta for delta in base.snapshot.changes(tensors) if delta.change.name == "norm").base
    damaged[3] ^= (
        1  # memory goes bad, and the trainer happens to agree: no digest that is moved along shows it
    )
    same = touched(tensors, "norm", 3, int(damaged[3]))
    with pytest.raises(InvariantBroken, match="not what its digests say: norm"):
        base.committed(WeightVersion(0, 2, base.survey(lambda: same).root))


def test_only_what_was_surveyed_is_committed() -> None:
    tensors = finite_model()
    base = DeltaBase(Snapshot(tensors, tensors), WeightVersion(0, 0, root_of(tensors)), 20)
    base.survey(lambda: few(tensors, 1))
    with pytest.raises(InvariantBroken, match="is not what was surveyed"):
        base.committed(WeightVersion(0, 1, root_of(few(tensors, 2))))


def test_an_anchor_is_written_beside_a_chain_that_costs_more_than_it(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        tensors = finite_model()
        for step in range(1, 12):
            tensors = few(tensors, step)
            await d.update(tensors, step)
        anchors = [m for m in d.store.versions() if m.kind == FULL]
        assert anchors and all(m.directory.startswith("anchor_v") for m in anchors)
        committed = {m.version.root for m in d.store.versions() if m.kind == DELTA}
        assert {m.version.root for m in anchors} <= committed

    on(tmp_path, "disk", use)


def counts() -> tuple[int, list[str]]:
    """Open files of this process, and its segments in /dev/shm."""
    mine = [name for name in os.listdir("/dev/shm") if name.startswith(f"turnout_{os.getpid()}_")]  # noqa: PTH208
    return len(os.listdir("/proc/self/fd")), mine  # noqa: PTH208


@pytest.mark.parametrize("way", WAYS)
def test_mem_02_nothing_grows_over_50_updates(way: str, tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        seen: list[tuple[int, list[str], int]] = []
        tensors = finite_model()
        for step in range(1, 51):
            tensors = few(tensors, step)
            await d.update(tensors, step)
            for engine in d.engines:
                engine.calls.clear()
            d.log.events.clear()
            if step in (10, 50):
                gc.collect()
                arrays = sum(type(each).__name__ == "ndarray" for each in gc.get_objects())
                seen.append((*counts(), arrays))
        assert d.holds(tensors)
        (files, segments, arrays), last = seen
        assert last[:2] == (files, segments)
        assert last[2] <= arrays + 8, "arrays are kept from one update to the next"
        assert len(d.store.versions()) < 20

    on(tmp_path, way, use, keep_all=False)


def test_a_joiner_asks_for_the_cheapest_route_where_the_current_version_is_a_delta(tmp_path: Path) -> None:
    async def use(d: Deployment) -> None:
        version = await d.update(few(finite_model(), 1), 1)
        d.engines[1].hold(finite_model())
        d.engines[1].script("/update_weights_from_disk", Answer(200, {"success": True, "message": ""}))
        assert not await d.updater.join(d.updater.fleet.engines["e1"], 10.0)  # it says so, and holds the base
        (sent,) = d.engines[1].sent("/update_weights_from_disk")
        assert sent["load_format"] == "delta" and sent["weight_version"] == version.label
        assert d.updater.fleet.fenced == {"e1"}

    on(tmp_path, "disk", use)
