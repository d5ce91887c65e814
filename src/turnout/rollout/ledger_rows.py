"""Rows of the ledger and what they are in Python. Pure.

Token ids are little-endian int32, log-probs float64 (exact), masks one byte a token; runs of versions and engines
JSON, [[tokens, name], ...]; `kv_mixed` is empty where no token is; `routed` is two uint32, width and bytes of the
prompt's rows, then these and the response's (turnout.core.routed), empty where nothing is recorded. A trajectory is
one row, or, while it is made, one row per piece: `start` is the place of the piece's first token.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from turnout.core.errors import DataError, Fault, InvariantBroken
from turnout.core.record import record
from turnout.core.routed import ROUTED_NONE, RoutedExperts
from turnout.core.types import Finish, Prompt, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans
from turnout.rollout.group_machine import GroupState

assert sys.byteorder == "little" and array("i").itemsize == 4, (
    "blobs are written as this machine holds numbers"
)
EMPTY = bytearray()  # sqlite3 looks for an adapter of each `bytes`, which costs more than the rest of a value
TOKEN_COLUMNS = slice(3, 5)  # of a row of `trajectories`: tokens, log-probs


class Piece(NamedTuple):
    """Tokens of a member that were made since the last piece: the first is number `start` of the response. The last
    piece may have no tokens, only how it ended, its text and its reward."""

    group_id: str
    member: int
    start: int
    part: Trajectory


@record
class GroupRow:
    """One attempt. `admitted`: train steps in the version that was current when its prompt left the source, or the
    step that sent it back as a later attempt. `trained` is the step that trained it, `moves` the number of rows in
    its history."""

    group_id: str
    ordinal: int
    attempt: int
    prompt_id: str
    state: GroupState
    admitted: int
    trained: int | None
    cause: str | None
    moves: int

    @classmethod
    def of(cls, row: Sequence[Any]) -> GroupRow:
        group_id, ordinal, attempt, prompt_id, state, *rest = row
        return cls(group_id, ordinal, attempt, prompt_id, GroupState(state), *rest)

    def values(self) -> tuple[Any, ...]:
        """As `of` takes them."""
        head = self.group_id, self.ordinal, self.attempt, self.prompt_id, self.state.value
        return *head, self.admitted, self.trained, self.cause, self.moves


@dataclass(frozen=True)
class Move:
    """One line of a group's history. `at` is wall time."""

    event: str
    state: str
    step: int | None
    incarnation: int
    at: float
    cause: str | None


@dataclass(frozen=True)
class Batch:
    """What a step was made of, in the order of its samples, and the incarnation that took it."""

    step: int
    incarnation: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True)
class VersionRow:
    """A version and what became of it: published, committed, aborted, abandoned, remade (abandoned, and its
    weights made again without a version of them) or void. `step` counts train steps done when it was exported."""

    label: str
    incarnation: int
    counter: int
    root: str
    step: int
    state: str


@dataclass(frozen=True)
class StoredGroup:
    """A group as the ledger holds it: members that have tokens by number."""

    row: GroupRow
    members: dict[int, Trajectory]

    def group(self, prompt: Prompt) -> RolloutGroup:
        """With its prompt, which the ledger holds by name only; raises DataError where the data has another."""
        row = self.row
        if prompt.prompt_id != row.prompt_id:
            reason = f"prompt {row.ordinal} is {prompt.prompt_id}, group {row.group_id} was made of {row.prompt_id}"
            raise DataError(Fault("prompt data", "", reason, "resume with the data that the run began with"))
        return RolloutGroup(row.group_id, row.ordinal, row.attempt, prompt, tuple(self.members.values()))


def piece_row(piece: Piece) -> tuple[Any, ...]:
    """The values of one row of `trajectories`, in the order of its columns."""
    group_id, member, start, part = piece
    tokens, logprobs = token_bytes(part)
    mixed = bytearray(part.kv_mixed)
    return (
        group_id,
        member,
        start,
        tokens,
        logprobs,
        bytearray(part.loss_mask),
        mixed if 1 in mixed else EMPTY,
        _text(part.spans.runs),
        _text(part.engines.runs),
        str(part.finish),
        part.reward,
        part.seed,
        part.text,
        _routed_bytes(part.routed) if part.routed.width else EMPTY,
    )


def token_bytes(part: Trajectory) -> tuple[bytearray, bytearray]:
    """Token ids and log-probs as the ledger stores them."""
    ids, logprobs = _packers(len(part.response_ids))
    return bytearray(ids(*part.response_ids)), bytearray(logprobs(*part.logprobs))


@lru_cache(4096)
def _packers(count: int) -> tuple[Callable[..., bytes], Callable[..., bytes]]:
    """Three times as fast as an array of them."""
    return struct.Struct(f"<{count}i").pack, struct.Struct(f"<{count}d").pack


def members_of(rows: Iterable[Sequence[Any]]) -> dict[int, Trajectory]:
    """Members by number, from rows ordered by member and start; raises InvariantBroken where pieces don't meet."""
    members: dict[int, Trajectory] = {}
    for group_id, member, start, tokens, *rest in rows:
        part = _part(tokens, rest)
        before = members.get(member)
        made = 0 if before is None else len(before.response_ids)
        if start != made:
            raise InvariantBroken(
                f"group {group_id}, member {member}: a piece at {start} after {made} tokens"
            )
        members[member] = part if before is None else before.joined(part)
    return members


def _part(tokens: bytes, rest: Sequence[Any]) -> Trajectory:
    logprobs, mask, mixed, versions, engines, finish, reward, seed, text, routed = rest
    return Trajectory(
        response_ids=tuple(array("i", tokens)),
        logprobs=tuple(array("d", logprobs)),
        loss_mask=tuple(mask),
        spans=VersionSpans(_runs(versions)),
        finish=Finish(finish),
        text=text,
        engines=Runs(_runs(engines)),
        seed=seed,
        reward=reward,
        kv_mixed=tuple(mixed),
        routed=_routed(routed),
    )


def _routed_bytes(routed: RoutedExperts) -> bytearray:
    return bytearray(struct.pack("<II", routed.width, len(routed.prompt)) + routed.prompt + routed.rows)


def _routed(blob: bytes) -> RoutedExperts:
    if not blob:
        return ROUTED_NONE
    width, prompt = struct.unpack_from("<II", blob)
    return RoutedExperts(width, blob[8 : 8 + prompt], blob[8 + prompt :])


@lru_cache(4096)
def _text(runs: tuple[tuple[int, str], ...]) -> str:
    return json.dumps(runs)


def _runs(text: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(tokens), str(name)) for tokens, name in json.loads(text))


def next_attempt(group: GroupRow, prompt: Prompt) -> RolloutGroup:
    """The attempt that follows this one."""
    attempt = group.attempt + 1
    return RolloutGroup(group_id_of(group.ordinal, attempt), group.ordinal, attempt, prompt)


def group_id_of(ordinal: int, attempt: int) -> str:
    return f"g{ordinal:08d}.{attempt}"
