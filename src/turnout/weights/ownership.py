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
from typing import Any

from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.weights.catalog import INCARNATIONS, RECORDS, RUN, Identity, identity_of, row_of, start_of
from turnout.weights.depot import Depot


class Ownership:
    """One incarnation's claim on a store, wherever it lies. `join` comes first."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot
        self.identity = Identity("", "", "")
        self.incarnation = 0

    def join(self, identity: Identity, incarnation: int, start: int, write_id: str) -> None:
        """Makes the store this run's, and this incarnation its writer, which goes on from the version with the
        counter `start`. Raises WeightError where it is another run's, or where the run has gone on already."""
        self.identity, self.incarnation = identity, incarnation
        if not self._depot.create_once(RUN, json.dumps(asdict(identity)).encode()):
            self._check_run()
        self.check()
        row = {"incarnation": incarnation, "start": start, "write_id": write_id}
        key = f"{INCARNATIONS}/{incarnation:06d}.json"
        if not self._depot.create_once(key, json.dumps(row).encode()):
            found = start_of(self._row(key), key)
            if found != (incarnation, start):
                raise WeightError(
                    f"{self._depot.name}: incarnation {incarnation} goes on from version {found[1]}, this one from "
                    f"{start}: a resumed run needs a new incarnation"
                )

    def check(self) -> None:
        """Raises WeightError where a newer incarnation of the run has opened the store."""
        names = [key[len(INCARNATIONS) + 1 : -5] for key in self._depot.sizes(INCARNATIONS)]
        newest = max((int(name) for name in names if name.isdigit()), default=self.incarnation)
        if newest > self.incarnation:
            raise WeightError(
                f"{self._depot.name}: incarnation {newest} of this run has taken over, this is incarnation "
                f"{self.incarnation}: it writes nothing more"
            )

    def publish(self, version: WeightVersion, write_id: str) -> None:
        """Creates the version's record, once; raises WeightError where somebody else has."""
        self.check()
        record = json.dumps({**asdict(version), "write_id": write_id}).encode()
        if not self._depot.create_once(f"{RECORDS}/{version.counter:06d}.json", record):
            raise WeightError(
                f"version {version.counter} was published by somebody else: is another trainer running?"
            )

    def _check_run(self) -> None:
        found = identity_of(self._row(RUN), self._depot.name)
        mine: dict[str, Any] = asdict(self.identity)
        differs = [f"{name} {value!r}, this is {mine[name]!r}" for name, value in asdict(found).items()
                   if value != mine[name]]  # fmt: skip
        if differs:
            raise WeightError(
                f"{self._depot.name} belongs to run {found.run_id}: it has {'; '.join(differs)}: "
                "give another --update-weight-disk-dir"
            )

    def _row(self, key: str) -> dict[str, Any]:
        data = self._depot.read(key)
        return row_of(b"" if data is None else data, f"{self._depot.name}/{key}")
