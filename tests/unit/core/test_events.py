"""Every kind of event through JSON and back."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from turnout.core import events
from turnout.core.events import KINDS, Event, VersionCommitted, from_json, to_json

SAMPLES: dict[Any, Any] = {
    str: 'tëxt\u2028"\n',
    int: 1 << 60,
    float: 0.1,
    bool: True,
    int | None: None,
    list[str]: ["a", ""],
    list[float]: [0.0, -1.5e-300],
    dict[str, float]: {"1": 0.5},
    list[int]: [0, 7],
    list[list[int]]: [[1, 2, 3, 4], []],
}


def example(kind: type[Event]) -> Event:
    hints = get_type_hints(kind)
    return kind(**{field.name: SAMPLES[hints[field.name]] for field in fields(kind)})


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_round_trip(kind: type[Event]) -> None:
    event = example(kind)
    row = json.loads(json.dumps(to_json(event, 12.5)))
    assert (row["event"], row["at"]) == (kind.__name__, 12.5)
    assert from_json(row) == event
    assert type(from_json(row)) is kind


def test_every_event_class_of_the_module_is_known() -> None:
    declared = {
        name for name, kind in vars(events).items() if isinstance(kind, type) and issubclass(kind, Event)
    }
    assert declared - {"Event"} == set(KINDS)


def test_unknown_kinds_and_fields_are_refused() -> None:
    with pytest.raises(KeyError):
        from_json({"event": "Nonsense", "at": 0.0})
    with pytest.raises(TypeError):
        from_json({"event": "VersionCommitted", "at": 0.0, "label": "v"})
    with pytest.raises(TypeError):
        from_json({"event": "VersionCommitted", "at": 0.0})


def test_an_event_holds_its_time_only_in_the_log() -> None:
    assert to_json(VersionCommitted("v"), 1.0) == {"event": "VersionCommitted", "at": 1.0, "version": "v"}
