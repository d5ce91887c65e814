"""The link between the two halves of a PD pair: how a request names it, and the messages on it. Used by both ends.

A request carries `bootstrap_host`, `bootstrap_port`, `bootstrap_room` as SGLang 0.5.23's routers send them. The
link itself is ours (SGLang's transports are Mooncake and NIXL): the decode engine connects to the prefill engine
and speaks first, so that a port scan hears nothing.

    decode                     prefill
    ASK      ->                          which room, and what the KV must look like
             <-  JOINED                  the room's request is here
             <-  OFFER                   its first token exists, its KV lies ready
    GO       ->                          pages are there; how to send
             <-  KV, CHUNK...            digest, then the bytes, where not over shared memory
    TAKEN    ->                          the KV lies in the decode engine's pages
    Either side may send ABORT at any time; a closed link is one.

Promises: a frame that is too long, of another version or of another kind than a message needs is a LinkError.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any, ClassVar, TypeAlias

from turnout.core.errors import Fault, TurnoutError

MAGIC, LINK_VERSION = b"TRPD", 1
HEADER = struct.Struct(">4sBBI")  # magic, version, kind, length of what follows
JSON_MAX = 1 << 20
CHUNK_MAX = 1 << 18
ROOM_BITS = 63
HOST_MAX = 255
MESSAGE_MAX = 1024


class LinkError(TurnoutError):
    """The other end broke the rules of the link, or said ABORT."""


class Kind(IntEnum):
    ASK = 1
    JOINED = 2
    OFFER = 3
    GO = 4
    KV = 5
    CHUNK = 6
    TAKEN = 7
    ABORT = 8


@dataclass(frozen=True)
class Bootstrap:
    """Where the prefill half of a request listens, and the room that both halves of the request name."""

    host: str
    port: int
    room: int

    def to_json(self) -> dict[str, Any]:
        """The fields of a request."""
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}

    @staticmethod
    def of(row: dict[str, Any], at: int, faults: list[Fault]) -> Bootstrap | None:
        """The fields of request `at` of a body: single values, or lists of one for each request. None where
        something is wrong, which is appended to `faults`."""
        values = []
        for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
            value = row.get(name)
            if isinstance(value, list):
                value = value[at] if at < len(value) else None
            values.append(value)
        host, port, room = values
        before = len(faults)
        if not isinstance(host, str) or not 0 < len(host) <= HOST_MAX:
            faults.append(Fault("bootstrap_host", str(host)[:40], "must be the prefill engine's host"))
        if type(port) is not int or not 0 < port < 65536:
            faults.append(
                Fault("bootstrap_port", str(port)[:40], "must be the prefill engine's bootstrap port")
            )
        if type(room) is not int or not 0 <= room < 1 << ROOM_BITS:
            faults.append(Fault("bootstrap_room", str(room)[:40], f"must be a number of {ROOM_BITS} bits"))
        if len(faults) > before:
            return None
        return Bootstrap(str(host).removeprefix("[").removesuffix("]"), int(port), int(room))


def seal(token: str | None, room: int) -> str:
    """Proof that the asker knows the admin token. A room is used once, so it can't be played again."""
    key = (token if token is not None else "").encode()
    return hmac.new(key, b"turnout-pd %d" % room, hashlib.sha256).hexdigest()


def prompt_digest(tokens: Sequence[int]) -> str:
    """Two halves of one request have the same."""
    return hashlib.blake2b(repr(list(tokens)).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Ask:
    """`layout` says in words what the KV must look like; see engine.pd_pages."""

    kind: ClassVar[Kind] = Kind.ASK
    room: int
    engine_id: str
    layout: str
    prompt: str
    seal: str


@dataclass(frozen=True)
class Joined:
    kind: ClassVar[Kind] = Kind.JOINED
    engine_id: str


@dataclass(frozen=True)
class Offer:
    """The first token with its log-prob and the weights that made it. `ended`: it is the last one too, and no KV
    follows. `kv_bytes` of KV are ready. `local`: the name of a socket on this host that hands out shared memory
    for `ticket`; empty for none."""

    kind: ClassVar[Kind] = Kind.OFFER
    token: int
    logprob: float
    label: str
    root: str
    seed: int
    ended: bool
    kv_bytes: int
    cached_tokens: int
    local: str
    ticket: str


@dataclass(frozen=True)
class Go:
    """`path`: "shm" (the ticket was shown already), "tcp", or "none" where nothing is to be sent."""

    kind: ClassVar[Kind] = Kind.GO
    path: str


@dataclass(frozen=True)
class Kv:
    """Digest (blake2b, 16 bytes, hex) of the bytes that follow, or that lie in the shared memory."""

    kind: ClassVar[Kind] = Kind.KV
    digest: str


@dataclass(frozen=True)
class Taken:
    kind: ClassVar[Kind] = Kind.TAKEN


@dataclass(frozen=True)
class Abort:
    kind: ClassVar[Kind] = Kind.ABORT
    message: str


Message: TypeAlias = Ask | Joined | Offer | Go | Kv | Taken | Abort
MESSAGES: dict[Kind, type[Message]] = {m.kind: m for m in (Ask, Joined, Offer, Go, Kv, Taken, Abort)}
_TYPES = {"int": int, "str": str, "float": float, "bool": bool}


def pack(message: Message) -> bytes:
    """A whole frame."""
    row = asdict(message)
    if isinstance(message, Abort):
        row["message"] = message.message[:MESSAGE_MAX]
    body = json.dumps(row).encode()
    return HEADER.pack(MAGIC, LINK_VERSION, message.kind, len(body)) + body


def chunk_header(length: int) -> bytes:
    return HEADER.pack(MAGIC, LINK_VERSION, Kind.CHUNK, length)


def unpack_header(header: bytes) -> tuple[Kind, int]:
    """Kind and length of the frame; raises LinkError for what is none of ours."""
    magic, version, kind, length = HEADER.unpack(header)
    if magic != MAGIC:
        raise LinkError("what came is not the language of a PD link")
    if version != LINK_VERSION:
        raise LinkError(f"the other end speaks version {version} of the PD link, this one {LINK_VERSION}")
    if kind not in set(Kind) or length > (CHUNK_MAX if kind == Kind.CHUNK else JSON_MAX):
        raise LinkError(f"a frame of kind {kind} with {length} bytes")
    return Kind(kind), length


def unpack(kind: Kind, body: bytes) -> Message:
    """The message of a frame's body; raises LinkError for a missing field or a value of another type. Fields that
    are not known are ignored."""
    try:
        row = json.loads(body)
    except ValueError as fault:
        raise LinkError(f"{kind.name}: not JSON") from fault
    if not isinstance(row, dict) or kind not in MESSAGES:
        raise LinkError(f"{kind.name}: not a message")
    values = {}
    for field in fields(MESSAGES[kind]):
        value = row.get(field.name)
        if type(value) is not _TYPES[str(field.type)] or (type(value) is float and not math.isfinite(value)):
            raise LinkError(f"{kind.name}: {field.name} is {str(value)[:40]!r}")
        values[field.name] = value
    return MESSAGES[kind](**values)
