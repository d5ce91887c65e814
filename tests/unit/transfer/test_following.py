"""Engines that followers bring to versions: what an update waits for, what stays routable, what is fenced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from turnout.core.errors import DeadlineExceeded, EngineBusy, EngineError, WeightError
from turnout.core.events import EngineReady, VersionAttested, VersionPublished
from turnout.core.version import WeightVersion
from turnout.observe.audit_versions import VERSION_RULES
from turnout.placement.real import RealClock
from turnout.serving.address import Address
from turnout.serving.client import Attestation, EngineClient
from turnout.transfer import following
from turnout.transfer.transport import Ready
from turnout.transfer.updater import UpdatePolicy, Updater
from turnout.weights.routing import Standing

BASE = WeightVersion(0, 0, f"{0:032x}")


def version(step: int) -> WeightVersion:
    return WeightVersion(0, step, f"{step:016x}{step:016x}")


class Quick(RealClock):
    """Pauses are short."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 100)


class Followed(EngineClient):
    """An engine whose follower brought `serves`; `root` where it holds something else than it says."""

    def __init__(self, name: str, clock: RealClock) -> None:
        super().__init__(name, Address("127.0.0.1", 1), clock)
        self.serves, self.root, self.trouble = BASE, "", ""
        self.proofs = 0

    async def served_label(self, deadline_s: float) -> str:
        if self.trouble:
            raise EngineError(self.engine_id, "attest", self.version, self.trouble)
        return self.serves.label

    async def attest(self, deadline_s: float) -> Attestation:
        self.proofs += 1
        return Attestation(self.serves.label, self.root or self.serves.root, "memory")

    async def set_version_label(self, label: str) -> None: ...


class Store:
    """A Transport that only publishes; `then` is called with what followers see from then on."""

    detached = True
    then: Callable[[WeightVersion], Any] = staticmethod(lambda _: None)

    async def publish(self, export: Any, train_step: int, deadline_s: float) -> Ready:
        self.then(version(train_step))
        await asyncio.sleep(0.02)  # followers may be faster than the update
        return Ready(version(train_step), 0)

    async def committed(self, version: WeightVersion) -> None: ...

    async def aborted(self, version: WeightVersion) -> None: ...

    async def activate(self, *_: Any) -> Any:
        raise AssertionError("nothing is pushed")

    prepare = catch_up = activate


class World:
    """Two engines, x and y; events as they come."""

    def __init__(self, needed: int | None = 1, lag: int = 2) -> None:
        self.events: list[Any] = [EngineReady(name, "", None, "none") for name in "xy"]
        self.clock = Quick()
        self.x, self.y = Followed("x", self.clock), Followed("y", self.clock)
        self.store = Store()
        policy = UpdatePolicy(needed, lag, drained=False, follow=True)
        self.updater = Updater(self.store, [self.x, self.y], self, self.clock, policy)  # type: ignore[arg-type]
        self.fleet = self.updater.fleet

    def emit(self, event: Any) -> None:
        self.events.append(event)

    def run(self, use: Callable[[], Awaitable[None]], looking: bool = True) -> None:
        async def main() -> None:
            await self.updater.adopt(BASE, 5.0)
            assert self.updater.following is not None
            work = use()
            await (self.updater.following.beside(work) if looking else work)  # type: ignore[arg-type]

        asyncio.run(asyncio.wait_for(main(), 20))
        for rule in VERSION_RULES:
            assert list(rule(self.events)) == []

    async def update(self, step: int, deadline_s: float = 20.0) -> None:
        update = self.updater.begin(tuple, step, deadline_s)
        await update.publish()
        await update.prepare()
        await update.commit()

    def routable(self) -> list[str]:
        return [engine.engine_id for engine in self.fleet.routable()]

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self.clock.sleep(0.5)


def test_enough_proofs_commit_and_the_slow_one_is_asked_within_the_lag_and_comes_back_by_itself() -> None:
    world = World()

    async def use() -> None:
        for step in (1, 2, 3):
            world.store.then = lambda made: setattr(world.x, "serves", made)
            await world.update(step)
            await world.until(lambda: "x" in world.routable())
            assert world.routable() == (["x", "y"] if step < 3 else ["x"])
            assert world.y.holds is not None and world.y.holds.version == BASE, "it serves what it served"
        world.y.serves = version(2)  # over version 1, which it never had
        await world.until(lambda: world.routable() == ["x", "y"])
        assert (world.y.version, world.fleet.standing(version(1).label, "y")) == (
            version(2).label,
            Standing.VOID,
        )
        proofs = world.y.proofs
        await world.clock.sleep(10 * following.LOOK_S)
        assert world.y.proofs == proofs, "what is known is not asked again"

    world.run(use)
    attested = [(e.engine, e.version) for e in world.events if isinstance(e, VersionAttested)]
    assert attested.count(("y", version(2).label)) == 1
    assert all(e.follow and e.at_least == 1 for e in world.events if isinstance(e, VersionPublished))


def test_where_both_are_needed_the_first_waits_for_the_second_and_takes_no_request() -> None:
    world = World(needed=2)

    async def use() -> None:
        pending = asyncio.ensure_future(world.update(1))
        world.x.serves = version(1)
        await world.until(lambda: world.routable() == ["y"])
        assert world.fleet.standing(version(1).label, "x") is Standing.TENTATIVE
        assert not pending.done()
        world.y.serves = version(1)
        await pending
        assert world.routable() == ["x", "y"]

    world.run(use)


def test_one_that_holds_what_never_became_current_is_fenced_and_heals_with_the_next() -> None:
    world = World(needed=2)

    async def use() -> None:
        world.store.then = lambda made: setattr(world.x, "serves", made)
        with pytest.raises(WeightError, match="not there yet: y"):
            await world.update(1, deadline_s=0.2)
        assert world.routable() == ["y"] and world.fleet.fenced == {"x"}
        world.y.serves = version(1)  # it comes late to what is void
        await world.until(lambda: world.fleet.fenced == {"x", "y"})
        assert world.fleet.standing(version(1).label, "y") is Standing.VOID
        world.store.then = lambda made: [setattr(engine, "serves", made) for engine in (world.x, world.y)]
        await world.update(2)
        assert world.routable() == ["x", "y"]

    world.run(use)


@pytest.mark.parametrize("busy", [True, False])
def test_one_that_is_late_or_busy_is_left_to_who_watches_its_health(busy: bool) -> None:
    world = World()
    asked: list[float] = []

    async def not_now(deadline_s: float) -> str:
        asked.append(deadline_s)
        if busy:
            raise world.y.fault(EngineBusy, "attest", "503")
        late = DeadlineExceeded("engine y to answer", deadline_s)
        raise world.y.fault(EngineError, "attest", str(late)) from late

    async def use() -> None:
        world.y.served_label = not_now  # type: ignore[method-assign]
        await world.until(lambda: len(asked) > 3)
        assert world.routable() == ["x", "y"]

    world.run(use)


@pytest.mark.parametrize(("wrong", "said"), [("root", "digest to"), ("trouble", "holds unknown weights")])
def test_one_that_cannot_prove_what_it_names_is_fenced_until_it_can(wrong: str, said: str) -> None:
    world = World()

    async def use() -> None:
        world.store.then = lambda made: setattr(world.x, "serves", made)
        await world.update(1)
        setattr(world.y, wrong, "f" * 32 if wrong == "root" else said)
        world.y.serves = version(1)
        await world.until(lambda: "y" in world.fleet.fenced)
        setattr(world.y, wrong, "")
        await world.until(lambda: world.routable() == ["x", "y"])

    world.run(use)
    fenced = [event for event in world.events if type(event).__name__ == "EngineFenced"]
    assert len(fenced) == 1 and said in fenced[0].reason


def test_tokens_of_a_version_that_it_may_have_gone_on_to_wait_for_its_proof() -> None:
    world = World()

    async def use() -> None:
        assert world.updater.following is not None
        update = world.updater.begin(tuple, 1, 20.0)
        await update.publish()
        label = version(1).label
        assert world.fleet.standing(label, "x") is Standing.TENTATIVE, "published, and it may hold it by now"
        assert world.fleet.standing(version(2).label, "x") is Standing.VOID
        world.x.serves = world.y.serves = version(1)
        await world.updater.following.look(world.y)
        await update.prepare()
        await update.commit()
        assert [world.fleet.standing(label, name) for name in "xy"] == [
            Standing.TENTATIVE,
            Standing.COMMITTED,
        ]
        await world.updater.following.look(world.x)
        assert world.fleet.standing(label, "x") is Standing.COMMITTED
        world.updater.lost("x", "it ended")
        assert world.fleet.standing(version(2).label, "x") is Standing.VOID

    world.run(use, looking=False)


def test_one_that_is_back_joins_with_whatever_committed_version_it_proves() -> None:
    world = World()

    async def use() -> None:
        world.store.then = lambda made: setattr(world.x, "serves", made)
        await world.update(1)
        world.updater.lost("y", "it ended")
        assert world.routable() == ["x"] and world.fleet.required() == ("x",)
        await world.clock.sleep(10 * following.LOOK_S)
        assert world.routable() == ["x"], "who watches its health says when it is back"
        back = Followed("y", world.clock)
        assert await world.updater.join(back, 5.0), "the base is within the lag"
        assert world.routable() == ["x", "y"]

    world.run(use)
