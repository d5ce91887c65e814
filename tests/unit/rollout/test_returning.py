"""What a resume brings back goes on when the weights that made it are there again, and not before."""

from __future__ import annotations

import pytest

from turnout.core.types import Finish, Prompt, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger_rows import VersionRow
from turnout.rollout.returning import Returned, Returning, due_step, masked

COMPLETED, PARTIAL = GroupState.COMPLETED, GroupState.PARTIAL


def version(step: int, state: str = "abandoned") -> VersionRow:
    return VersionRow(f"v{step}", 0, step, f"root-{step}", step, state)


VERSIONS = {f"v{step}": version(step, "committed" if step <= 2 else "abandoned") for step in range(6)}


def group(name: str, *runs: tuple[int, str]) -> RolloutGroup:
    count = sum(tokens for tokens, _ in runs)
    made = Trajectory(
        tuple(range(count)),
        (0.5,) * count,
        (1,) * count,
        VersionSpans(runs),
        Finish.STOP,
        "",
        Runs(((count, "e"),) if count else ()),
        7,
    )
    return RolloutGroup(name, 0, 0, Prompt("p", (1,), "p"), (made,) if count else ())


def released(returning: Returning, steps_done: int, root: str | None = None) -> dict[str, set[str]]:
    found = returning.committed(steps_done, f"root-{steps_done}" if root is None else root)
    return {one.group.group_id: set(one.foreign) for one in found}


def test_tokens_of_abandoned_weights_wait_until_these_are_made_again() -> None:
    groups = [
        Returned(group("old", (2, "v1"), (3, "v2")), COMPLETED, 0),
        Returned(group("new", (2, "v2"), (3, "v3")), COMPLETED, 0),
        Returned(group("newer", (1, "v3"), (1, "v4")), PARTIAL, 0),
        Returned(group("none"), GroupState.WAITING, 4),
    ]
    returning = Returning(groups, VERSIONS)
    assert returning.waits
    assert released(returning, 2) == {"old": set()}
    assert released(returning, 3) == {"new": set()}
    assert released(returning, 4) == {"newer": set(), "none": set()}
    assert not returning.waits and released(returning, 5) == {}


def test_tokens_of_weights_that_came_out_otherwise_are_told_by_their_label() -> None:
    groups = [Returned(group("a", (1, "v2"), (2, "v3"), (3, "v4")), COMPLETED, 0)]
    returning = Returning(groups, VERSIONS)
    assert released(returning, 3, "another") == {}
    assert released(returning, 4) == {"a": {"v3"}}


def test_a_version_that_is_passed_over_does_not_hold_anything_for_ever() -> None:
    """As when the interval of updates grew, or one was aborted: what it made is of other weights."""
    returning = Returning([Returned(group("a", (1, "v3")), COMPLETED, 0)], VERSIONS)
    assert released(returning, 2) == {}
    assert released(returning, 5) == {"a": {"v3"}}


def test_weights_made_again_stand_also_where_their_version_is_not_committed() -> None:
    returning = Returning([Returned(group("a", (1, "v3")), COMPLETED, 0)], VERSIONS)
    returning.made(3, "root-3")  # published, and its update failed
    assert released(returning, 4) == {"a": set()}


def test_and_where_an_earlier_resume_made_them_without_a_version() -> None:
    returning = Returning(
        [Returned(group("a", (1, "v3")), COMPLETED, 0)], VERSIONS | {"v3": version(3, "remade")}
    )
    assert released(returning, 3) == {"a": set()}


@pytest.mark.parametrize(("state", "foreign"), [("aborted", set[str]()), ("void", {"v3"})])
def test_an_update_that_failed_on_the_way_to_the_checkpoint_tells_its_weights(
    state: str, foreign: set[str]
) -> None:
    again = VersionRow("v9", 1, 9, "root-3", 3, state)
    returning = Returning([Returned(group("a", (1, "v3")), COMPLETED, 0)], VERSIONS | {"v9": again})
    assert released(returning, 4) == {"a": foreign}


@pytest.mark.parametrize("state", ["published", "aborted"])
def test_a_version_that_was_never_committed_stands_for_nothing(state: str) -> None:
    versions = VERSIONS | {"v3": version(3, state)}
    returning = Returning([Returned(group("a", (1, "v3"), (1, "unknown")), COMPLETED, 0)], versions)
    assert released(returning, 3) == {"a": {"v3", "unknown"}}


def test_recorded_batches_stand_until_one_of_their_groups_is_spoilt() -> None:
    returning = Returning([], {}, {2: ("a", "b"), 3: ("c",), 4: ("d",)})
    assert returning.batch(2) == ("a", "b") and returning.batch(5) is None
    returning.spoil("x")
    assert returning.batch(4) == ("d",)
    returning.spoil("c")
    assert returning.batch(2) == ("a", "b") and returning.batch(3) is None and returning.batch(4) is None


def test_only_tokens_of_the_named_weights_are_masked() -> None:
    one = group("a", (2, "v2"), (2, "v3"), (1, "v2"))
    assert masked(one, {"v3"}).trajectories[0].loss_mask == (1, 1, 0, 0, 1)
    assert masked(one, {"v9"}) == one
    twice = masked(masked(one, {"v3"}), {"v2"})
    assert twice.trajectories[0].loss_mask == (0,) * 5


@pytest.mark.parametrize(
    ("admitted", "behind", "interval", "due"),
    [(0, 0, 1, 0), (3, 3, 1, 0), (4, 3, 1, 4), (5, 3, 2, 4), (4, 3, 4, 4), (5, 4, 4, 4), (7, 2, 3, 6)],
)
def test_the_version_at_admission(admitted: int, behind: int, interval: int, due: int) -> None:
    assert due_step(admitted, behind, interval) == due
