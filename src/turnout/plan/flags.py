"""A candidate as options of a run, and whether Turnout takes them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnout.config.load import load
from turnout.core.errors import ConfigError
from turnout.plan.cluster import Cluster
from turnout.plan.search import Candidate

MODES = {"disk delta": ("delta", "disk"), "follower": ("delta", "follower")}


@dataclass(frozen=True)
class Flags:
    """`words` to paste; `refused`: what the run's own checks say of them (empty: they pass)."""

    words: tuple[str, ...]
    refused: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return " ".join(self.words)


def words_of(row: Candidate, cluster: Cluster) -> tuple[str, ...]:
    """The options that make the layout, the schedule and the way of versions."""
    layout, update = row.layout, row.update
    assert update is not None
    found: list[Any] = ["--schedule", row.schedule]
    if row.schedule == "async":
        found += ["--max-staleness", row.lead]
    if layout.site:
        found += ["--rollout-external-engine-addrs", f"{layout.site}-0:30000", f"{layout.site}-1:30000"]
        found += ["--update-weight-disk-dir", "s3://BUCKET/PREFIX"]
    else:
        found += ["--rollout-num-engines", layout.engines]
    if cluster.cores:
        found += ["--engine-threads", layout.tp, "--trainer-threads", layout.train]
    elif not layout.site:
        found += ["--rollout-num-gpus-per-engine", layout.tp]
    if not cluster.cores:
        found += ["--actor-num-gpus-per-node", layout.train]
    if layout.kind != "disaggregated":
        found += ["--colocate"]
    if layout.kind == "time-sliced":
        found += ["--offload"]
    mode, transport = MODES.get(update.transport, ("full", update.transport))
    found += ["--update-weight-mode", mode, "--update-weight-transport", transport]
    return tuple(map(str, found))


def checked(row: Candidate, cluster: Cluster, run: Path, own: Sequence[str] = ()) -> Flags:
    """The options on top of the run's file and of what was given besides, through all checks of `turnout check`."""
    words = words_of(row, cluster)
    try:
        load(run, [*own, *words])
    except ConfigError as error:
        return Flags(words, tuple(fault.line() for fault in error.faults))
    return Flags(words)
