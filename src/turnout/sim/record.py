"""What a world wrote down of one run, for the checkers: what was told, what trained, what was sent where.

The truth about weights is the trainer's History and the engines' roots, the truth about tokens is the model; events
and the ledger are what the control plane says. `Failure.count` is the key of the report that it belongs to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from turnout.core.events import Event, VersionCommitted, VersionPublished
from turnout.core.record import record
from turnout.core.types import Prompt, RolloutGroup
from turnout.schedule.evaluations import EvalPlan
from turnout.sim.report import INVARIANT
from turnout.sim.trainer import History


@dataclass(frozen=True)
class Failure:
    count: str
    text: str


@record
class Told:
    """An event of one life (0: the first), at a virtual time."""

    at: float
    life: int
    event: Event


@dataclass(frozen=True)
class Rules:
    """The numbers that a run promised to keep. `slots`, `window` and `max_staleness` as the options; `per_step`
    groups of `samples` members, at least `min_group` of them; `most_tokens` of a response; `engine_lag` of an
    engine that serves; `steps` train steps in all."""

    slots: int
    window: int
    max_staleness: int
    per_step: int
    samples: int
    min_group: int
    most_tokens: int
    engine_lag: int
    steps: int
    median: float
    deterministic: bool


@record
class LedgerGroup:
    """A row of the ledger as it stands at the end."""

    group_id: str
    ordinal: int
    attempt: int
    state: str
    cause: str | None


@dataclass
class WorldRecord:
    """See the module. `stored` are the groups that were ever written as complete, by id; `final_root` what the
    trainer holds after the last step; `failures` what was seen while the world went on."""

    rules: Rules
    base_root: str
    prompts: Sequence[Prompt] = ()
    evals: EvalPlan | None = None
    told: list[Told] = field(default_factory=list[Told])
    history: History = field(default_factory=History)
    stored: dict[str, list[RolloutGroup]] = field(default_factory=lambda: defaultdict(list))
    ledger: list[LedgerGroup] = field(default_factory=list[LedgerGroup])
    failures: list[Failure] = field(default_factory=list[Failure])
    final_root: str | None = None
    lives: int = 0

    def broken(self, text: str, count: str = INVARIANT) -> None:
        self.failures.append(Failure(count, text))

    def roots(self) -> dict[str, str]:
        """The root digest of each version that any life named, by label."""
        named = {e.event.version: e.event.root for e in self.told if isinstance(e.event, VersionPublished)}
        for one in self.told:  # a base is adopted without being published
            if isinstance(one.event, VersionCommitted) and one.event.version not in named:
                head = one.event.version.split("-")[1]
                named[one.event.version] = next((r for r in self.history.made if r.startswith(head)), head)
        return named

    def committed(self) -> frozenset[str]:
        return frozenset(e.event.version for e in self.told if isinstance(e.event, VersionCommitted))
