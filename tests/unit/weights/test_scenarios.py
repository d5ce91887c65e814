"""Scripts of weight updates (scenarios/*.txt): events, and under each what the machine does and where it then is.

A script is its own expected output: it is played again and compared with the file, line by line.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from turnout.core.errors import IllegalTransition
from turnout.weights.update_machine import (
    Attested,
    Begin,
    Event,
    Failed,
    Go,
    Joined,
    Prepared,
    Published,
    UpdateState,
    step,
)

FOLDER = Path(__file__).with_name("scenarios")
INDENT = "    "


def event_of(line: str) -> Event:
    """begin N of|following E ..., published R, prepared E, go [busy E ...], attested E R,
    failed E|- why, joined E"""
    verb, *words = line.split()
    match verb:
        case "begin":
            return Begin(tuple(words[2:]), int(words[0]), follow=words[1] == "following")
        case "published":
            return Published(words[0])
        case "prepared":
            return Prepared(words[0])
        case "go":
            return Go(tuple(words[1:]))
        case "attested":
            return Attested(words[0], words[1])
        case "failed":
            return Failed(None if words[0] == "-" else words[0], " ".join(words[1:]))
        case "joined":
            return Joined(words[0])
    raise ValueError(line)


def played(text: str) -> str:
    """The script with every answer made anew."""
    state, lines = UpdateState(), []
    for line in text.splitlines():
        if line.startswith(INDENT):
            continue
        lines.append(line)
        if not line or line.startswith("#"):
            continue
        try:
            state, effects = step(state, event_of(line))
        except IllegalTransition:
            lines.append(f"{INDENT}refused")
            continue
        for effect in effects:
            said = [str(getattr(effect, name)) for name in effect.__dataclass_fields__]
            lines.append(f"{INDENT}{' '.join([type(effect).__name__, *said])}")
        engines = ", ".join(f"{name} {where}" for name, where in state.engines.items())
        lines.append(f"{INDENT}= {state.phase}: {engines}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_a_scenario(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert played(text) == text


def test_the_scenarios_are_there() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 12
