"""The weight updates of one engine: which one is under way, what it staged, when it is put into place.

Promises: one update at a time; everything but the swap happens on worker threads while the engine serves; what
comes between `begin` and `end` is activated as a whole or not at all; a begun update that nothing comes for, and
a prepared one that nobody activates, are dropped with their memory after the update deadline. Tensors without a
begin are an update of their own, as in SGLang before 0.5.23, but never the rest of one that was dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from turnout.core.errors import EngineBusy, WeightError
from turnout.core.version import label_counter
from turnout.engine.audits import Audits
from turnout.engine.background import in_background
from turnout.engine.core import Activated, Activation
from turnout.engine.delta import ChangeStaging, stage_version
from turnout.engine.loop import ComputeThread
from turnout.engine.staged import FAULTS_SHOWN, Staged
from turnout.engine.update_requests import Flags, Update
from turnout.engine.weights import Fill, Staging
from turnout.weights.buckets import Slot
from turnout.weights.changes import Change
from turnout.weights.hooks import PRE_READ_FLAG, load_hook
from turnout.weights.manifest import folder_counter
from turnout.weights.tensors import HostTensor
from turnout.weights.visibility import Patience, visible_manifest

log = logging.getLogger(__name__)
VISIBLE_S = 5.0  # how long a version's folder may take to show on this host: network file systems cache names
T = TypeVar("T")
Read = Callable[[], Iterable[HostTensor]]
ReadChanges = Callable[[], Iterable[Change]]


@dataclass
class _Session:
    """An update between `begin` and `end`. `fault`: why it can no longer be activated."""

    staging: Staging | ChangeStaging
    flags: Flags = field(default_factory=lambda: Flags(None, abort_all=False, flush=False))
    fault: str | None = None
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True)
class Prepared:
    """Weights that wait for their activation. `label` is what their tokens will carry."""

    prepared_id: str
    staged: Staged
    label: str


class Updates:
    """See the module. Lives on the event loop."""

    def __init__(self, compute: ComputeThread) -> None:
        self._compute, self._deadline_s = compute, compute.settings.update_timeout_s
        self.holder: str | None = None
        self._session: _Session | None = None
        self._dropped = False  # a begun update was dropped and its sender may not know
        self._one_by_one = asyncio.Lock()
        self._prepared: Prepared | None = None
        self._prepared_timer: asyncio.TimerHandle | None = None
        self.audits = Audits(compute)
        hook = compute.settings.custom_update_weight_pre_read_path
        self._pre_read = None if hook is None else load_hook(PRE_READ_FLAG, hook)

    def check_free(self) -> None:
        """Raises EngineBusy (phase "update") while an update is under way."""
        if self.holder is not None:
            self._busy(f"an update from {self.holder} is under way")

    async def from_disk(self, update: Update) -> Activated:
        """A whole checkpoint folder."""
        return await self.alone(str(update.folder), lambda: self._from_disk(update))

    async def prepare(self, update: Update) -> Prepared:
        """Stages a folder and keeps it for `activate`, in place of what was prepared before."""
        return await self.alone(str(update.folder), lambda: self._prepare(update))

    async def activate(self, prepared_id: str, flags: Flags) -> Activated:
        """Puts a prepared set into place; raises WeightError for an id that is not the one kept."""
        return await self.alone(prepared_id, lambda: self._activate_prepared(prepared_id, flags))

    def drop_prepared(self) -> None:
        if self._prepared_timer is not None:
            self._prepared_timer.cancel()
        self._prepared = self._prepared_timer = None

    def begin(self, base_root: str | None = None) -> None:
        """Opens an update for tensors to come, or for changes of the weights with this root digest; raises
        WeightError where others are held."""
        self.check_free()
        weights, fence = self._compute.core.weights, self._compute.core.fenced
        if base_root is not None and not weights.storage.takes_changes:
            raise WeightError("this engine takes whole tensors only, no changes")
        if base_root is not None and (fence is not None or weights.root != base_root):
            held = (
                fence if fence is not None else f"{self._compute.attested.version} with root {weights.root}"
            )
            raise WeightError(f"the changes are relative to the root {base_root}; what is held is {held}")
        self._dropped = False
        self.holder = "begin_weight_update"
        self._session = _Session(
            Staging(weights, whole=True) if base_root is None else ChangeStaging(weights)
        )
        self._rearm(self._session)

    async def tensors(self, read: Read, flags: Flags) -> Activated | None:
        """Takes the tensors that `read` returns on a worker thread: staged for `end` (None), or an update of
        their own where none was begun. Raises WeightError with what is wrong with them."""
        if self._session is not None:
            if not isinstance(self._session.staging, Staging):
                raise WeightError("changes were begun (base_root), and tensors came")
            return await self._shielded(
                self._staged(self._session, _adding(self._session.staging, read), flags)
            )
        if self._dropped:
            raise WeightError(
                f"the update was dropped after {self._deadline_s:g} s without a call; begin it again"
            )
        return await self.alone("tensors", lambda: self._from_tensors(read, flags))

    async def slices(self, slots: Sequence[Slot], fill: Fill, flags: Flags) -> None:
        """Stages tensors whose parts come to each rank by itself (Staging.take), for `end`."""
        if self._session is None or not isinstance(self._session.staging, Staging):
            raise WeightError("slices come only after /begin_weight_update")
        staging = self._session.staging
        await self._shielded(self._staged(self._session, lambda: staging.take(slots, fill), flags))

    async def changes(self, read: ReadChanges, flags: Flags) -> None:
        """Stages the changes that `read` returns on a worker thread for `end`. Raises WeightError with what is
        wrong with them."""
        if self._session is None or not isinstance(self._session.staging, ChangeStaging):
            raise WeightError("changes come only after /begin_weight_update with a base_root")
        await self._shielded(self._staged(self._session, _changing(self._session.staging, read), flags))

    async def end(self, root: str | None = None, drop: bool = False) -> Activated | None:
        """Puts what came since `begin` into place; None where nothing came, or to `drop` it. Raises WeightError
        where another root digest would come out than `root`. The update is over either way."""
        if self._session is None:
            dropped, self._dropped = self._dropped, False
            why = f"; it was dropped after {self._deadline_s:g} s without a call" if dropped else ""
            raise WeightError(f"no weight update was begun{why}")
        return await self._shielded(self._end(self._session, root, drop))

    async def forget(self) -> None:
        """Drops what was begun and what is prepared: nobody comes back for it."""
        if self._session is not None:
            with contextlib.suppress(WeightError):  # it has ended meanwhile
                await self.end(drop=True)
        self.drop_prepared()

    async def _from_disk(self, update: Update) -> Activated:
        staged = await self._stage_folder(update)
        return await self._activate(staged, _label(update.flags, staged), update.flags)

    async def _stage_folder(self, update: Update) -> Staged:
        weights = self._compute.core.weights
        first = self._compute.settings.model_path.resolve()  # read again, it is rounded as at the start

        def stage() -> Staged:
            if self._pre_read is not None:
                self._pre_read(update.folder)
            if folder_counter(update.folder.name) is not None:
                visible_manifest(update.folder, Patience(VISIBLE_S, time.monotonic, time.sleep))
            if update.store:
                return stage_version(weights, update.folder)
            return weights.stage_folder(update.folder, may_round=update.folder == first)

        try:
            return await in_background(stage)
        except WeightError:
            self.audits.failed()
            raise

    async def _prepare(self, update: Update) -> Prepared:
        self.drop_prepared()  # first: two sets and the live one would be three models in memory
        staged = await self._stage_folder(update)
        self._prepared = Prepared(secrets.token_hex(8), staged, _label(update.flags, staged))
        loop = asyncio.get_running_loop()
        self._prepared_timer = loop.call_later(self._deadline_s, self.drop_prepared)
        return self._prepared

    async def _activate_prepared(self, prepared_id: str, flags: Flags) -> Activated:
        held = self._prepared
        if held is None or held.prepared_id != prepared_id:
            kept = f"{held.prepared_id} is" if held is not None else "none is"
            raise WeightError(f"no set {prepared_id} is prepared; {kept}")
        activated = await self._activate(held.staged, held.label, flags)
        self.drop_prepared()
        return activated

    async def _from_tensors(self, read: Read, flags: Flags) -> Activated:
        staging = Staging(self._compute.core.weights)
        await in_background(_stage, staging, _adding(staging, read))
        return await self._activate(*await self._sealed(staging, flags), flags)

    async def _staged(self, session: _Session, take: Callable[[], None], flags: Flags) -> None:
        async with self._one_by_one:
            if session is not self._session:
                raise WeightError("the update ended before these tensors were taken")
            self._rearm(session, waits=False)
            try:
                await in_background(_stage, session.staging, take)
            except WeightError as fault:
                session.fault = str(fault)
                raise
            finally:
                self._rearm(session)
            session.flags = Flags(
                flags.label if flags.label is not None else session.flags.label,
                session.flags.abort_all or flags.abort_all,
                session.flags.flush or flags.flush,
            )

    async def _end(self, session: _Session, root: str | None, drop: bool) -> Activated | None:
        async with self._one_by_one:
            if session is not self._session:
                raise WeightError("the update has ended already")
            self._rearm(session, waits=False)
            try:
                if drop:
                    return None
                if session.fault is not None:
                    raise WeightError(f"not put into place: {session.fault}")
                relabels = isinstance(session.staging, ChangeStaging) and session.flags.label is not None
                if not session.staging.count and not relabels:
                    return None
                staged, label = await self._sealed(session.staging, session.flags)
                if root is not None and staged.root != root:
                    raise WeightError(f"the root would be {staged.root}, the sender's is {root}")
                return await self._activate(staged, label, session.flags)
            except WeightError:
                self.audits.failed()
                raise
            finally:
                self._close()

    async def _sealed(self, staging: Staging | ChangeStaging, flags: Flags) -> tuple[Staged, str]:
        needs_all = self._compute.core.memory.stale is not None
        staged = await in_background(staging.seal, needs_all)
        return staged, _label(flags, staged)

    async def _activate(self, staged: Staged, label: str, flags: Flags) -> Activated:
        if staged.nothing:
            return await self._compute.do(lambda core: core.keep(label), self._deadline_s)
        activation = Activation(staged, label, flags.abort_all, flags.flush)
        done = await self._compute.do(lambda core: core.activate(activation), self._deadline_s)
        log.info("serving %s after a pause of %.3f ms", label, done.pause_s * 1e3)
        self.audits.updated(done.attested.verified)
        return done

    async def alone(self, source: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs `work` as the one update under way; raises EngineBusy (phase "update") where there is one."""
        self.check_free()
        self.holder = source
        return await self._shielded(self._releasing(work()))

    async def _releasing(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        finally:
            self.holder = None

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """An update that has begun goes on when its caller hangs up."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(_retrieved)
        return await asyncio.wait_for(asyncio.shield(task), self._deadline_s)

    def _rearm(self, session: _Session, waits: bool = True) -> None:
        """Restarts the deadline of a begun update; not `waits`: stops it."""
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
        if waits and session is self._session:
            session.timer = asyncio.get_running_loop().call_later(self._deadline_s, self._drop)

    def _drop(self) -> None:
        log.warning("a begun weight update is dropped: nothing came for %g s", self._deadline_s)
        self._dropped = True
        self._close()

    def _close(self) -> None:
        self._session = self.holder = None

    def _busy(self, reason: str) -> None:
        raise EngineBusy(self._compute.settings.engine_id, "update", self._compute.attested.version, reason)


def check_label(label: str, root: str) -> None:
    """Raises WeightError for a label of ours that names other content; other texts name nothing."""
    if label_counter(label) is not None and label.split("-")[1] != root[:16]:
        raise WeightError(f"weight_version {label} names other weights: the root is {root}")


def _label(flags: Flags, staged: Staged) -> str:
    """The label for the new weights. One that names other content is refused: a label must not lie."""
    if flags.label is None:
        return staged.manifest.version.label if staged.manifest else f"root-{staged.root[:16]}"
    check_label(flags.label, staged.root)
    return flags.label


def _adding(staging: Staging, read: Read) -> Callable[[], None]:
    def take() -> None:
        for tensor in read():
            staging.add(tensor)

    return take


def _changing(staging: ChangeStaging, read: ReadChanges) -> Callable[[], None]:
    def take() -> None:
        for change in read():
            staging.add(change)

    return take


def _stage(staging: Staging | ChangeStaging, take: Callable[[], None]) -> None:
    """Raises WeightError with what is wrong with what is taken."""
    known = len(staging.faults)
    take()
    new = staging.faults[known:]
    if new:
        raise WeightError("; ".join(new[:FAULTS_SHOWN]))


def _retrieved(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # so that a caller who hung up leaves no warning behind
