"""Wires the weight plane of a run: what the engines hold at the start, the store, the way of versions to engines.

Promises: the root of the base version is that of the checkpoint in the form in which engines attest it; an engine
that cannot take what the run would send is refused before the first prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnout.config.run_config import RunConfig
from turnout.core.errors import WeightError
from turnout.core.ports import Clock, Store
from turnout.core.version import WeightVersion
from turnout.schedule.parts import TrainerThread
from turnout.serving.client import EngineClient
from turnout.serving.weights_client import DELTA_FORMATS, OnUpdate
from turnout.train.backend import TrainBackend
from turnout.transfer.delta_base import DeltaBase
from turnout.transfer.snapshot import Snapshot
from turnout.transfer.transport import Transport
from turnout.transfer.transports import TransportPlan, make_transport
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of
from turnout.weights.hooks import POST_WRITE_FLAG, load_hook
from turnout.weights.manifest import FULL, complete_versions
from turnout.weights.mirror import Mirror
from turnout.weights.object_depot import ObjectDepot
from turnout.weights.retention import FollowerWatch
from turnout.weights.store import WeightStore
from turnout.weights.tensors import narrowed


@dataclass(frozen=True)
class Origin:
    """Where an incarnation's weights begin: the trainer, the checkpoint that trainer and engines loaded, and the
    counter of the version that a resumed one goes on from (0: the checkpoint's own weights)."""

    trainer: TrainerThread
    checkpoint: Path
    incarnation: int
    start: int = 0


def make_store(config: RunConfig, root: Path, files: Store, clock: Clock, checkpoint: Path) -> WeightStore:
    """The run's store in the folder `root`, with its copy in an object store and its hook where they are asked
    for; nothing is opened. Raises ConfigError for a hook, WeightError for a URL, that is no good."""
    store = WeightStore(root, files, checkpoint, config.update_weight_buffer_size)
    store.followers, store.wall = FollowerWatch(config.follower_expiry), clock.wall
    if config.weight_url is not None:
        store.mirror = Mirror(ObjectDepot(config.weight_url))
    if config.custom_update_weight_post_write_path is not None:
        store.post_write = load_hook(POST_WRITE_FLAG, config.custom_update_weight_post_write_path)
    return store


async def open_plane(
    config: RunConfig, store: WeightStore, clock: Clock, origin: Origin, run_id: str
) -> tuple[Transport, WeightVersion]:
    """The transport, and the base version; the store is open then. Raises WeightError."""
    snapshot: Snapshot | None = None
    if config.update_weight_mode == "delta":
        what = "the base of deltas to be read"
        snapshot = await origin.trainer.call(what, lambda t: snapshot_of(t, origin.checkpoint))
        root = snapshot.root
    else:
        what = "the base weights to be digested"
        root = await origin.trainer.call(what, lambda t: base_root(t, origin.checkpoint))
    await asyncio.to_thread(store.open, run_id, origin.incarnation, root, origin.start)
    version = WeightVersion(origin.incarnation, 0, root)
    base = None
    if snapshot is not None:
        base = DeltaBase(snapshot, version, config.digest_audit_interval, first_in_full=origin.start > 0)
    plan = TransportPlan(
        config.update_weight_transport,
        config.update_weight_buffer_size,
        config.update_weight_disk_keep_files,
        config.encoding,
        config.check_weight_update_equal,
        OnUpdate(config.weight_update_policy),
    )
    return make_transport(plan, store, clock, base), version


async def check_engines(config: RunConfig, engines: Sequence[EngineClient]) -> None:
    """Raises WeightError for an engine that applies no deltas where the run would send some."""
    if config.update_weight_mode != "delta" or config.followed:
        return
    needed = DELTA_FORMATS[config.update_weight_transport]
    for engine in engines:
        known = (await engine.server_info()).get("delta_formats") or ()
        if needed not in known:
            raise WeightError(
                f"engine {engine.engine_id} applies no deltas: {needed!r} is not among its delta_formats "
                f"{list(known)}; use --update-weight-mode full, or `turnout weights follow` beside it"
            )


def final_checkpoint(store: Path, version: WeightVersion) -> Path | None:
    """The folder of a version in full; None where the store has only changes of it, or nothing."""
    full = (m for m in complete_versions(store) if m.version == version and m.kind == FULL)
    return next((store / manifest.directory for manifest in full), None)


def snapshot_of(trainer: TrainBackend, checkpoint: Path) -> Snapshot:
    """What engines hold that loaded the checkpoint."""
    return Snapshot(read_checkpoint(checkpoint), trainer.export())


def base_root(trainer: TrainBackend, checkpoint: Path) -> str:
    """The root of the trainer's weights before training, each tensor in the dtype that the checkpoint stores
    where it holds the value exactly: the form in which engines attest what they loaded."""
    stored = {tensor.name: tensor.dtype for tensor in read_checkpoint(checkpoint)}
    return root_of(narrowed(tensor, stored.get(tensor.name, tensor.dtype)) for tensor in trainer.export())
