"""A publisher as a process, which tells each phase of publishing, on a slow disk.

    python -m tests.publisher_child STORE INCARNATION START STEP

Goes on from the version with the counter START, of the train step STEP, as this incarnation, and publishes one
version after another until it is killed. The weights of a step are `weights_at(step)`.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

from tests.followed import stepped, tiny
from tests.published import RUN, deltas
from turnout.core.version import WeightVersion
from turnout.placement.real import DiskStore
from turnout.weights.digest import root_of
from turnout.weights.store import WeightStore
from turnout.weights.tensors import HostTensor

STAGE, FSYNC, RENAME, RECORD = "stage", "fsync", "rename", "record"
PAUSE_S = 0.05


def weights_at(step: int) -> list[HostTensor]:
    tensors = tiny()[1]
    return stepped(tensors, step) if step else tensors


class ToldStore(DiskStore):
    """Tells the steps of publishing a folder, one after another, and takes its time."""

    def publish_folder(self, staged: Path, final: Path) -> None:
        tell(FSYNC)
        super().publish_folder(staged, final)
        rest()

    def create_once(self, path: Path, data: bytes) -> bool:
        tell(RECORD)
        rest()
        return super().create_once(path, data)


def tell(phase: str) -> None:
    print(f"PHASE {phase}", flush=True)


def rest() -> None:
    time.sleep(random.random() * PAUSE_S)


def rename_told() -> None:
    rename = Path.rename

    def told(self: Path, target: Any) -> Path:
        if ".tmp-" in self.name and self.is_dir():
            tell(RENAME)
            rest()
        return rename(self, target)

    Path.rename = told  # type: ignore[method-assign]


def main(root: Path, incarnation: int, start: int, step: int) -> None:
    folder, base = tiny()
    store = WeightStore(root, ToldStore(), folder, 1 << 16)
    store.open(RUN, incarnation, root_of(base), start)
    rename_told()
    now = weights_at(step)
    version = WeightVersion(0, start, root_of(now))
    while True:
        step += 1
        after = weights_at(step)
        tell(STAGE)
        if step % 3 == 1:
            version = store.publish(after, step).version
        else:
            version = store.publish_delta(deltas(now, after), version, "packed", step).version
        print(f"DONE {version.label}", flush=True)
        now = after
        time.sleep(0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
