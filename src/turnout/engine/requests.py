"""The bodies of control calls as typed values (that of /generate: turnout.engine.generate_request).

Promises: every refusal is a BadRequest with all faults of the body, raised before the compute thread hears of it.
"""

from __future__ import annotations

import json
from typing import Any

from turnout.core.errors import Fault, UserError
from turnout.engine.core import PAUSE_MODES

RID_MAX = 256
TIMEOUT_MAX_S = 3600.0


class BadRequest(UserError):
    """A body that is refused with 400."""

    title = "request refused"


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object; an empty body is an empty object."""
    try:
        row = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError) as fault:
        raise BadRequest(Fault("body", "", f"is not JSON: {fault}")) from fault
    if not isinstance(row, dict):
        raise BadRequest(Fault("body", type(row).__name__, "must be a JSON object"))
    return row


def parse_abort(row: dict[str, Any]) -> str | None:
    """The id to abort, None for all."""
    everything, rid = row.get("abort_all", False), row.get("rid")
    if everything is True:
        return None
    if not isinstance(rid, str) or not rid:
        raise BadRequest(Fault("rid", str(rid), "must be the id of one request, or abort_all true"))
    return rid


def parse_pause(row: dict[str, Any]) -> str:
    mode = row.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise BadRequest(Fault("mode", str(mode), f"must be one of {', '.join(PAUSE_MODES)}"))
    return mode


def parse_timeout(text: str | None) -> float:
    """Seconds of a query's `timeout`, from 0 to TIMEOUT_MAX_S; 0 where there is none."""
    try:
        seconds = 0.0 if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= TIMEOUT_MAX_S:
        raise BadRequest(Fault("timeout", str(text)[:40], f"must be seconds from 0 to {TIMEOUT_MAX_S:g}"))
    return seconds
