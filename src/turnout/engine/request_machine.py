"""One request of the scheduler: its states, and all that is known of it. Pure.

WAITING -> RUNNING -> FINISHED | ABORTED; preemption leads from RUNNING back to WAITING.
A request split over two engines (engine.pd) takes two ways more. Where its prompt is computed, RUNNING -> HELD at
its first token: pages without a slot, until they were read. Where it is decoded, PENDING -> WAITING once the prompt
was computed elsewhere -> RECEIVING: slot and pages, but no KV yet -> RUNNING, past its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from turnout.core.machine import Table
from turnout.core.types import Finish
from turnout.core.version import VersionConstraint, VersionSpans
from turnout.engine.radix import Node
from turnout.protocol.pd import Bootstrap
from turnout.protocol.sglang import SamplingParams


class State(StrEnum):
    PENDING = "pending"
    WAITING = "waiting"
    RECEIVING = "receiving"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"
    ABORTED = "aborted"


class Event(StrEnum):
    OFFER = "offer"
    ADMIT = "admit"
    RESERVE = "reserve"
    ATTACH = "attach"
    HOLD = "hold"
    PREEMPT = "preempt"
    FINISH = "finish"
    ABORT = "abort"


TABLE: Table[State, Event] = Table(
    "request",
    {
        (State.PENDING, Event.OFFER): State.WAITING,
        (State.WAITING, Event.ADMIT): State.RUNNING,
        (State.WAITING, Event.RESERVE): State.RECEIVING,
        (State.RECEIVING, Event.ATTACH): State.RUNNING,
        (State.RUNNING, Event.HOLD): State.HELD,
        (State.RUNNING, Event.PREEMPT): State.WAITING,
        (State.RUNNING, Event.FINISH): State.FINISHED,
        (State.HELD, Event.FINISH): State.FINISHED,
        **{
            (state, Event.ABORT): State.ABORTED
            for state in State
            if state not in (State.FINISHED, State.ABORTED)
        },
    },
)


@dataclass(frozen=True)
class KvMoved:
    """How the KV of a split request's prompt went from one engine to the other: `path` "shm", "tcp" or "none"."""

    bytes: int
    path: str
    prefill_engine: str
    decode_engine: str

    def to_json(self) -> dict[str, str | int]:
        """Ours, in `meta_info`."""
        return {
            "pd_transfer_bytes": self.bytes,
            "pd_transfer_path": self.path,
            "pd_prefill_engine": self.prefill_engine,
            "pd_decode_engine": self.decode_engine,
        }


@dataclass(eq=False)
class Request:
    """One generation. `tokens` is prompt plus output; `computed` positions have their KV in `pages`, of which the
    first `depth` lie in the prefix cache on the path to `node` (engine.page_pool); `mixed`: some of it is of older
    weights than those that run now, `mixed_runs`: [start, end) of the output tokens that were made so. `seed` and
    `end_ids` (token ids that end it) are resolved by whoever makes the request. Requests of different `namespace`
    share no cached pages; `constraint` names the weights that may answer. `hold`: its first token leads to HELD;
    `ends` says whether that was its last. `remote`: the KV of its prompt comes from another engine and is not there
    yet. `bootstrap` names the other half of a split request, `moved` what went between the two.
    `input_logprobs` are those of the prompt tokens after position `logprob_start` (None: not asked for), given what
    stands before each; of the raw logits. `routed` has the experts of the positions from
    `routed_from` on (None: not asked for) that were computed, here or by who left them in the cache."""

    rid: str
    tokens: list[int]
    params: SamplingParams
    seed: int
    end_ids: frozenset[int] = frozenset()
    namespace: str = ""
    constraint: VersionConstraint | None = None
    prompt_tokens: int = 0
    arrival: int = 0
    state: State = State.WAITING
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[tuple[int, str]] = field(default_factory=list)  # of `spans`
    mixed: bool = False
    mixed_runs: list[tuple[int, int]] = field(default_factory=list)
    finish: Finish | None = None
    message: str = ""
    slot: int = -1
    node: Node | None = None
    depth: int = 0
    seen: tuple[Node | None, int] = (None, 0)  # while it waits: how much of its path others held, last time
    cached: int = 0  # prompt tokens whose KV was in the cache
    preempted: bool = False
    logprob_start: int | None = None
    input_logprobs: list[float] = field(default_factory=list)
    routed_from: int | None = None
    routed: bytearray = field(default_factory=bytearray)
    hold: bool = False
    ends: bool = False
    made_by: str = ""  # root digest of the weights that made the token it is held at
    remote: bool = False
    bootstrap: Bootstrap | None = None
    moved: KvMoved | None = None

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def spans(self) -> VersionSpans:
        return VersionSpans(tuple(self.runs))

    def kv_mixed(self, count: int) -> list[tuple[int, int]]:
        """`mixed_runs` of the first `count` output tokens."""
        return [(start, min(end, count)) for start, end in self.mixed_runs if start < count]

    @property
    def unscored(self) -> int | None:
        """The first position whose row must still give the log-prob of the prompt token after it; None: no row."""
        if self.logprob_start is None:
            return None
        position = self.logprob_start + len(self.input_logprobs)
        return position if position < self.prompt_tokens - 1 else None

    @property
    def reusable(self) -> int:
        """Positions whose KV may come from the cache: rows that give logits must be computed."""
        unscored = self.unscored
        return len(self.tokens) - 1 if unscored is None else unscored

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Positions known but not computed; 1 for a request that decodes."""
        return len(self.tokens) - self.computed


@dataclass(eq=False, slots=True)
class Chunk:
    """Compute positions first .. first + count of a request; `samples` where its last row gives a token. Rows of
    the prompt from `score_from` on (None: none) also give the log-prob of the prompt token that follows."""

    request: Request
    first: int
    count: int
    samples: bool
    score_from: int | None = None

    @property
    def scores(self) -> range:
        """Positions whose rows give a log-prob."""
        if self.score_from is None:
            return range(0)
        return range(self.score_from, min(self.first + self.count, self.request.prompt_tokens - 1))
