"""Groups and trajectories as the dashboard tells them, from the ledger. Rows of JSON; reads only."""

from __future__ import annotations

from typing import Any

from turnout.core.types import Trajectory
from turnout.dash.texts import Texts
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger_list import LedgerList, Wanted
from turnout.rollout.ledger_rows import GroupRow, Move

TOKENS, BEFORE = 2048, 8
FORGOTTEN = {
    GroupState.TRAINED: "two newer checkpoints hold what followed",
    GroupState.DROPPED: "a group that is dropped keeps none",
    GroupState.REQUEUED: "an attempt that is sent back keeps none",
}
NONE_YET = "no token of it has been written yet"
STAYS = "What made them, how they ended and their rewards stay (docs/guides/ledger.md)."


def group_rows(ledger: LedgerList, wanted: Wanted) -> list[dict[str, Any]]:
    """A page of groups."""
    return [_listed(ledger, row) for row in ledger.page(wanted)]


def named_rows(ledger: LedgerList, names: list[str]) -> list[dict[str, Any]]:
    """These groups in this order; those that the ledger lost are left out."""
    return [_listed(ledger, row) for name in names if (row := ledger.find(name)) is not None]


def _listed(ledger: LedgerList, row: GroupRow) -> dict[str, Any]:
    history, members = ledger.history(row.group_id), _members(ledger, row.group_id)
    rewards = [one["reward"] for one in members if one["reward"] is not None]
    begun, done = _moments(history)
    return {
        **_told(row),
        "tokens": sum(one["tokens"] for one in members),
        "members": len(members),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "seconds": None if begun is None or done is None else round(done - begun, 3),
        "at": history[-1].at if history else None,
        "stored": ledger.is_stored(row.group_id),
    }


def _told(row: GroupRow) -> dict[str, Any]:
    return {
        "group": row.group_id,
        "attempt": row.attempt,
        "prompt": row.prompt_id,
        "state": row.state.value,
        "admitted": row.admitted,
        "trained": row.trained,
        "cause": row.cause,
    }


def _moments(history: list[Move]) -> tuple[float | None, float | None]:
    """When it was admitted, and when it was complete."""
    done = [move.at for move in history if move.event == "complete"]
    return (history[0].at if history else None), (done[0] if done else None)


def group_detail(ledger: LedgerList, group_id: str, texts: Texts) -> dict[str, Any] | None:
    """All but the tokens; None where the ledger has no such group."""
    row = ledger.find(group_id)
    if row is None:
        return None
    stored, members = ledger.is_stored(group_id), _members(ledger, group_id)
    missing = ""
    if not stored:
        missing = _missing(row, bool(members))
    prompt, why = texts.prompt(row.prompt_id)
    return {
        **_told(row),
        "history": [
            {
                "event": move.event,
                "state": move.state,
                "step": move.step,
                "incarnation": move.incarnation,
                "at": move.at,
                "cause": move.cause,
            }
            for move in ledger.history(group_id)
        ],
        "members": members,
        "stored": stored,
        "missing": missing,
        "prompt_text": prompt,
        "prompt_missing": why,
        "attempts": [_told(one) for one in ledger.sisters(group_id)],
    }


def _missing(row: GroupRow, members: bool) -> str:
    """Why there are no tokens."""
    if row.state not in FORGOTTEN:
        return NONE_YET
    return f"Tokens, log-probs and masks are forgotten: {FORGOTTEN[row.state]}. {STAYS if members else ''}".strip()


def _members(ledger: LedgerList, group_id: str) -> list[dict[str, Any]]:
    """A row per member: `tokens`, how it ended, its reward, and runs of versions and engines."""
    found: dict[int, dict[str, Any]] = {}
    for piece in ledger.pieces(group_id):
        one = found.setdefault(
            piece["member"], {"member": piece["member"], "tokens": 0, "versions": [], "engines": []}
        )
        one["tokens"] += sum(tokens for tokens, _ in piece["versions"])
        one["versions"] += piece["versions"]
        one["engines"] += piece["engines"]
        one["finish"], one["reward"] = piece["finish"], piece["reward"]
    return [found[number] for number in sorted(found)]


def member_tokens(
    ledger: LedgerList, which: tuple[str, int], first: int, texts: Texts
) -> dict[str, Any] | None:
    """TOKENS tokens of a member from `first` on, with what is known of each; None where it has none. `lags` are in
    train steps, for a group that was trained."""
    group_id, member = which
    row, whole = ledger.find(group_id), ledger.member(group_id, member)
    if row is None or whole is None:
        return None
    part = _cut(whole, first, first + TOKENS)
    steps = ledger.version_steps({label for _, label in part.spans.runs})
    pieces = texts.pieces(part.response_ids, whole.response_ids[max(0, first - BEFORE) : first])
    return {
        "group": group_id,
        "member": member,
        "first": first,
        "count": len(whole.response_ids),
        "ids": part.response_ids,
        "texts": pieces,
        "texts_missing": texts.missing,
        "logprobs": [round(value, 4) for value in part.logprobs],
        "mask": part.loss_mask,
        "mixed": part.kv_mixed if 1 in part.kv_mixed else [],
        "versions": [[tokens, label, _lag(row, steps.get(label))] for tokens, label in part.spans.runs],
        "engines": part.engines.runs,
        "finish": whole.finish.value,
        "reward": whole.reward,
        "text": whole.text[:200_000] if pieces is None else "",
    }


def _cut(whole: Trajectory, first: int, end: int) -> Trajectory:
    return whole.cut(min(end, len(whole.response_ids))).after(min(first, len(whole.response_ids)))


def _lag(row: GroupRow, step: int | None) -> int | None:
    return None if row.trained is None or step is None else row.trained - step
