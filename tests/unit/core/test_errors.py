"""What errors say, and the exit status of each branch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from turnout.core import errors
from turnout.core.errors import ConfigError, DeadlineExceeded, EngineBusy, EngineDead, Fault, TurnoutError


def test_a_user_error_tells_all_its_faults() -> None:
    one = Fault("--lr", "-1", "is negative", "give a positive number")
    two = Fault("line 4", "", "is no JSON")
    text = str(ConfigError([one, two]))
    assert text.splitlines() == [
        "configuration refused (2 faults)",
        "  --lr = -1: is negative -> give a positive number",
        "  line 4: is no JSON",
    ]
    assert str(ConfigError(one)).startswith("configuration refused (1 fault)")


def test_an_engine_error_names_engine_phase_and_version() -> None:
    for kind in (EngineDead, EngineBusy):
        text = str(kind("engine-3", "rollout", "v000007-aa", "connection refused"))
        assert text == "engine engine-3 failed in phase rollout, last version v000007-aa: connection refused"


def test_a_deadline_names_what_was_waited_for() -> None:
    assert str(DeadlineExceeded("the trainer to save", 30.0)) == "waited 30 s for the trainer to save"


@pytest.mark.parametrize(
    ("name", "status"),
    [("TurnoutError", 1), ("ConfigError", 2), ("DataError", 2), ("ModelError", 2), ("EngineError", 4),
     ("EngineDead", 4), ("EngineRefused", 4), ("EngineBusy", 4), ("WeightError", 5), ("TrainError", 6),
     ("DeadlineExceeded", 7), ("IllegalTransition", 70), ("InvariantBroken", 70)],
)  # fmt: skip
def test_exit_statuses(name: str, status: int) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, TurnoutError)
    assert kind.exit_status == status


def every_kind(kind: type[TurnoutError]) -> set[type[TurnoutError]]:
    return {kind, *(below for child in kind.__subclasses__() for below in every_kind(child))}


def test_every_status_that_a_command_ends_with_is_explained_and_no_other() -> None:
    raised = {kind.exit_status for kind in every_kind(TurnoutError) if kind.__module__ == errors.__name__}
    others = {0, 3, 130}  # done; not done, and no fault; Ctrl-C
    assert raised | others == set(errors.EXIT_STATUSES) and not raised & others


def test_the_guide_has_the_same_table() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "failures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([0-9, ]+) \| (.+) \|$", guide, re.MULTILINE)
    assert {int(status): meaning for status, meaning in rows} == errors.EXIT_STATUSES
