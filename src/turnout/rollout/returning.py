"""Groups that a resume brings back, until they may go on. Pure.

A resume goes back to a checkpoint; the ledger holds what was made after it. Which of it may be used follows from
the weights: a version after the checkpoint is abandoned, and made again. A group waits

- for the version of each step at which tokens of it were made by an abandoned version, and
- for the version that was current when it was admitted, so that what it still samples comes from there.

Then its tokens stand where the weights were made again with the same root, whether or not engines got them: an
update that fails changes no batch. The labels of other weights are told, and --on-resume decides. The batches that
were taken after the checkpoint are trained again as they were recorded.
Promises: no group is handed out twice, nor with a version that is not made again yet; nothing waits for a step that
none of the groups here is needed for (docs/guides/resume.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from turnout.core.types import RolloutGroup, Trajectory
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger_rows import VersionRow
from turnout.rollout.staleness import Fate

COMMITTED, ABANDONED, ABORTED, REMADE = "committed", "abandoned", "aborted", "remade"
STANDING = (COMMITTED, REMADE)
MADE = (*STANDING, ABORTED)  # the trainer had these weights on its way to the checkpoint


@dataclass(frozen=True)
class Returned:
    """A group of the ledger: WAITING, PARTIAL or COMPLETED. `due`: train steps in the version that it waits for."""

    group: RolloutGroup
    state: GroupState
    due: int


@dataclass(frozen=True)
class Released:
    """A group that goes on, and the labels of its tokens whose weights were not made again."""

    group: RolloutGroup
    state: GroupState
    foreign: frozenset[str]


@dataclass
class Returning:
    """Those that wait. `groups` by ordinal; `versions` as the ledger holds them, by label; `batches` the recorded
    ones by step; `policy` says what becomes of tokens whose weights were not made again; `passed` are the ordinals
    of later groups than the oldest that is not complete that were trained before the checkpoint."""

    groups: list[Returned] = field(default_factory=list[Returned])
    versions: Mapping[str, VersionRow] = field(default_factory=dict[str, VersionRow])
    batches: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    policy: Fate = Fate.REPLAY
    passed: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._waiting = list(self.groups)
        self._abandoned = {label for label, row in self.versions.items() if row.state == ABANDONED}
        self._made = {(row.step, row.root) for row in self.versions.values() if row.state in MADE}

    @property
    def waits(self) -> bool:
        """Whether a version is still to be made for some."""
        return bool(self._waiting)

    def made(self, steps_done: int, root: str) -> None:
        """The trainer has these weights, whether or not engines get them."""
        self._made.add((steps_done, root))

    def committed(self, steps_done: int, root: str) -> list[Released]:
        """The groups that go on now that this version is current."""
        self.made(steps_done, root)
        free = [one for one in self._waiting if self._needs(one) <= steps_done]
        self._waiting = [one for one in self._waiting if self._needs(one) > steps_done]
        return [Released(one.group, one.state, self._foreign(one.group)) for one in free]

    def first(self) -> Released:
        """The oldest one goes on without its version, since that cannot be made without it: the batches before it
        came out otherwise than they were recorded."""
        one = self._waiting.pop(0)
        return Released(one.group, one.state, self._foreign(one.group))

    def batch(self, step: int) -> tuple[str, ...] | None:
        """The groups of a step as they were recorded; None where it was not."""
        return self.batches.get(step)

    def recorded(self, group_id: str) -> bool:
        """Whether the group stands in a recorded batch."""
        return any(group_id in ids for ids in self.batches.values())

    def spoil(self, group_id: str) -> None:
        """The group is not what it was: the batch that it stood in, and later ones, are made anew."""
        steps = [step for step, ids in self.batches.items() if group_id in ids]
        if steps:
            self.batches = {step: ids for step, ids in self.batches.items() if step < min(steps)}

    def _needs(self, one: Returned) -> int:
        """Train steps in the version that lets it go on."""
        steps = [self.versions[label].step for label in labels_of(one.group) & self._abandoned]
        return max([one.due, *steps])

    def _foreign(self, group: RolloutGroup) -> frozenset[str]:
        """Labels of versions that are unknown, or abandoned and not made again to the same root."""

        def stands(label: str) -> bool:
            row = self.versions.get(label)
            return (
                row is not None and (row.step, row.root) in self._made and row.state in (*STANDING, ABANDONED)
            )

        return frozenset(label for label in labels_of(group) if not stands(label))


def labels_of(group: RolloutGroup) -> set[str]:
    """The versions that made any token of a group."""
    return {label for made in group.trajectories for label in made.spans.labels}


def masked(group: RolloutGroup, labels: Iterable[str]) -> RolloutGroup:
    """The group with no loss on the tokens that these versions made."""
    gone = frozenset(labels)
    members: list[Trajectory] = []
    for made in group.trajectories:
        kept: list[int] = []
        for tokens, label in made.spans.runs:
            part = made.loss_mask[len(kept) : len(kept) + tokens]
            kept += [0] * tokens if label in gone else part
        members.append(replace(made, loss_mask=tuple(kept)))
    return replace(group, trajectories=tuple(members))


def due_step(admitted: int, behind: int, interval: int) -> int:
    """Train steps in the version that was current when a group was admitted at step `admitted`, where that was
    after the checkpoint with `behind` steps; versions are made every `interval` steps."""
    return 0 if admitted <= behind else max(behind, admitted - admitted % interval)
