"""Who may write to a store: one run, and of that run only the newest incarnation.

    run.json                      {run_id, model, base_root}; created once
    INCARNATIONS/000003.json      {incarnation, start, write_id}; created once, when that one opens the store
    PUBLISHED/000123.json         {incarnation, counter, root, write_id}; created once

Promises: a record is created once and never changes; whoever sees a newer incarnation raises before it writes
anything more; an answer that was lost is settled by reading back whose record it is.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turnout.core.errors import WeightError
from turnout.core.ports import Store
from turnout.core.version import WeightVersion
from turnout.weights.catalog import INCARNATIONS, RECORDS, RUN, Identity, identity_of, row_of, start_of

LEFTOVER_MARKS = (".tmp-", ".removed-")


class Ownership:
    """One incarnation's claim on a store. `join` comes first."""

    def __init__(self, root: Path, files: Store) -> None:
        self.root, self._files = root, files
        self.identity = Identity("", "", "")
        self.incarnation = 0

    def join(self, identity: Identity, incarnation: int, start: int, write_id: str) -> None:
        """Makes the store this run's, and this incarnation its writer, which goes on from the version with the
        counter `start`. Raises WeightError where it is another run's, or where the run has gone on already."""
        self.identity, self.incarnation = identity, incarnation
        for folder in (RECORDS, INCARNATIONS):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        if not self.create(self.root / RUN, json.dumps(asdict(identity)).encode()):
            self._check_run()
        self.check()
        row = {"incarnation": incarnation, "start": start, "write_id": write_id}
        path = self.root / INCARNATIONS / f"{incarnation:06d}.json"
        if not self.create(path, json.dumps(row).encode()):
            found = start_of(row_of(self._files.read(path), str(path)), str(path))
            if found != (incarnation, start):
                raise WeightError(
                    f"{path}: incarnation {incarnation} goes on from version {found[1]}, this one from {start}: "
                    "a resumed run needs a new incarnation"
                )

    def check(self) -> None:
        """Raises WeightError where a newer incarnation of the run has opened the store."""
        names = [name[:-5] for name in self._files.names(self.root / INCARNATIONS) if name.endswith(".json")]
        newest = max((int(name) for name in names if name.isdigit()), default=self.incarnation)
        if newest > self.incarnation:
            raise WeightError(
                f"{self.root}: incarnation {newest} of this run has taken over, this is incarnation "
                f"{self.incarnation}: it writes nothing more"
            )

    def publish(self, version: WeightVersion, write_id: str) -> None:
        """Creates the version's record, once; raises WeightError where somebody else has."""
        self.check()
        record = json.dumps({**asdict(version), "write_id": write_id}).encode()
        if not self.create(self.root / RECORDS / f"{version.counter:06d}.json", record):
            raise WeightError(
                f"version {version.counter} was published by somebody else: is another trainer running?"
            )

    def create(self, path: Path, data: bytes) -> bool:
        """Whether `path` is there with this very content, which no other writer has; False where it is another's.
        Raises OSError where that cannot be known."""
        try:
            if self._files.create_once(path, data):
                return True
        except OSError as fault:
            # The link may have been made although its answer was lost (a server of NFS that went and came back).
            try:
                found = self._files.read(path)
            except FileNotFoundError:
                raise fault from None
            return found == data
        return self._files.read(path) == data

    def sweep(self) -> None:
        """Removes what an interrupted write or removal left."""
        for folder in (self.root, self.root / RECORDS, self.root / INCARNATIONS):
            for name in self._files.names(folder):
                if any(mark in name for mark in LEFTOVER_MARKS):
                    self._files.remove_tree(folder / name)

    def _check_run(self) -> None:
        path = self.root / RUN
        found = identity_of(row_of(self._files.read(path), str(path)), str(self.root))
        mine: dict[str, Any] = asdict(self.identity)
        differs = [f"{name} {value!r}, this is {mine[name]!r}" for name, value in asdict(found).items()
                   if value != mine[name]]  # fmt: skip
        if differs:
            raise WeightError(
                f"{self.root} belongs to run {found.run_id}: it has {'; '.join(differs)}: "
                "give another --update-weight-disk-dir"
            )
