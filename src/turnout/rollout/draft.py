"""What exists of one sample while it is made.

Promises: tokens, log-probs, mask, versions, engines and KV marks grow and shrink together; tokens of a version that
is not committed yet are held back, and taken back where it never will be: neither journal nor trajectory ever has
one. The journal is told that there are new tokens at the latest with the `pace.tokens`-th of them or with the first
that comes `pace.seconds` after the last report; it takes them when it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnout.core.errors import DataError, Fault
from turnout.core.ports import Clock
from turnout.core.record import record
from turnout.core.routed import BYTES, ROUTED_NONE, RoutedExperts, missing
from turnout.core.types import ENVIRONMENT, Finish, Trajectory
from turnout.core.version import Runs, VersionSpans
from turnout.protocol.sglang import GenerateReply
from turnout.protocol.stream import PartialReply
from turnout.weights.routing import Standing

Journal = Callable[["Draft"], None]
REMEDY = "an SGLang needs --enable-return-routed-experts"
WORST = (Standing.COMMITTED, Standing.TENTATIVE, Standing.VOID)


@dataclass(frozen=True)
class Pace:
    """How long new tokens may go unreported: so many of them, or so many seconds."""

    tokens: int = 32
    seconds: float = 1.0


@record
class Desk:
    """What drafts need of the world: `standing` says what became of a version, by its label and the engine that
    named it."""

    standing: Callable[[str, str], Standing]
    clock: Clock
    pace: Pace


class Draft:
    """See the module. `journal` is told that there are new tokens, and asks for them (`after`). `mask_kv_mixed`:
    tokens that were made on KV of older weights do not train."""

    def __init__(self, begun: Trajectory, desk: Desk, journal: Journal, mask_kv_mixed: bool = False) -> None:
        self._desk, self._journal, self._mask_kv_mixed, self.seed = desk, journal, mask_kv_mixed, begun.seed
        self._pace = desk.pace
        self.ids = [*begun.response_ids]
        self._logprobs = [*begun.logprobs]
        self._mask = [*begun.loss_mask]
        self._mixed = [*begun.kv_mixed]
        self._plain = not self._mask  # so far all tokens train, none was made on older KV: no marks are kept
        self._spans = [*begun.spans.runs]
        self._engines = [*begun.engines.runs]
        self._routed = begun.routed  # of the first tokens; the others have no record
        self.opening = begun.opening  # how many tokens no model made before the first that one did
        # tokens of committed versions; tokens that the journal was told of
        self._sure = self._told = len(self.ids)
        self._open: list[tuple[int, str, tuple[str, ...]]] = []  # the others: label, who made them
        self._reported = desk.clock.now()
        self.turn = 0  # where the turn begins that is being made

    def mask_old(self, serving: str) -> None:
        """What other versions than this one made so far does not train (--mask-offpolicy-in-partial-rollout)."""
        at = 0
        self._keep_marks()
        for tokens, label in self._spans:
            if label != serving:
                self._mask[at : at + tokens] = [0] * tokens
            at += tokens

    def extend(self, new: PartialReply) -> bool:
        """Takes tokens over; False where some are of a version that never will be committed, and gone."""
        count, among = len(new.output_ids), new.among or (new.engine_id,)
        if not self._plain or 1 in new.kv_mixed:
            self._keep_marks()
            self._mask += [1 - mark for mark in new.kv_mixed] if self._mask_kv_mixed else (1,) * count
            self._mixed += new.kv_mixed
        self.ids += new.output_ids
        self._logprobs += new.logprobs
        before = 0 if self._spans else self.opening
        for tokens, label in new.spans:
            tokens, before = tokens + before, 0  # noqa: PLW2901 - an opening counts as of the first version
            _lengthen(self._spans, tokens, label)
            if self._open or self._standing(label, among) is not Standing.COMMITTED:
                self._open.append((tokens, label, among))
            else:
                self._sure += tokens
        _lengthen(self._engines, count, new.engine_id)
        return not self._open or self.settle() is not Standing.VOID

    @property
    def prompt_routed(self) -> bool:
        """Whether the experts of the prompt's positions are known."""
        return bool(self._routed.prompt)

    def routed(self, reply: GenerateReply, start: int, prompt: int) -> None:
        """Takes over the experts of the positions from `start` on, as the reply that made the last tokens tells;
        `prompt` counts that of the sample. Tokens that have a record keep it. Raises DataError where a reply that
        is no abort has none, or rows that can't be of those positions."""
        rows, told = reply.routed, reply.prompt_tokens + len(reply.output_ids) - 1 - start
        if not reply.output_ids:
            return
        width = self._routed.width or len(rows) // (BYTES * told)
        size = BYTES * width
        if not rows or len(rows) != size * told:
            if reply.finish is Finish.ABORT:
                return
            raise DataError(
                Fault("routed_experts", f"{len(rows) // BYTES} values", f"of {told} positions", REMEDY)
            )
        first = start - (prompt - 1)  # the token that was sampled at the first of these positions
        before = self._routed.prompt or rows[: max(0, -first) * size]
        known = self._routed.rows + missing(width, max(0, first - len(self._routed)))
        known += rows[len(known) - first * size : (len(self.ids) - first) * size]
        self._routed = RoutedExperts(width, before, known)

    def append(self, ids: Sequence[int]) -> None:
        """Takes over what the environment said: it does not train, and counts as of the version before it. Only
        when all tokens are of committed versions, of which there is one at least."""
        assert self._spans and not self._open, "the environment speaks after a turn that has ended"
        self._add(ids)
        _lengthen(self._spans, len(ids), self._spans[-1][1])
        self._sure += len(ids)

    def begin(self, ids: Sequence[int]) -> None:
        """Takes over what comes before the first turn, besides the prompt: it does not train, and is neither
        reported nor part of a trajectory before a model's first token comes, of whose version it counts."""
        assert not self.ids, "an opening comes first"
        self._add(ids)
        self.opening = len(ids)

    def _add(self, ids: Sequence[int]) -> None:
        count = len(ids)
        self._keep_marks()
        self.ids += ids
        self._logprobs += [0.0] * count
        self._mask += [0] * count
        self._mixed += [0] * count
        _lengthen(self._engines, count, ENVIRONMENT)

    def _keep_marks(self) -> None:
        if self._plain:
            self._plain = False
            self._mask, self._mixed = [1] * len(self.ids), [0] * len(self.ids)

    def until_environment(self, first: int) -> int:
        """Where the environment speaks next, from this token on; the end where it does not."""
        return self._next(first, environment=True)

    def until_model(self, first: int) -> int:
        """Where the model speaks next, from this token on; the end where it does not."""
        return self._next(first, environment=False)

    def _next(self, first: int, environment: bool) -> int:
        at = 0
        for tokens, name in self._engines:
            if at + tokens > first and (name == ENVIRONMENT) == environment:
                return max(at, first)
            at += tokens
        return at

    def settle(self) -> Standing:
        """COMMITTED: every token is of a committed version; TENTATIVE: of some it is not known yet; VOID: some were
        of a version that never will be committed, and are gone, with all after them."""
        while self._open:
            tokens, label, engines = self._open[0]
            standing = self._standing(label, engines)
            if standing is Standing.VOID:
                self.drop_unsure()
            if standing is not Standing.COMMITTED:
                return standing
            self._sure += tokens
            del self._open[0]
        return Standing.COMMITTED

    def _standing(self, label: str, engines: tuple[str, ...]) -> Standing:
        """The worst of what one of these engines, it is not known which, says of a version."""
        if len(engines) == 1:
            return self._desk.standing(label, engines[0])
        return max((self._desk.standing(label, name) for name in engines), key=WORST.index)

    def drop_unsure(self) -> None:
        """Forgets the tokens of versions that are not committed."""
        self._cut(self._sure)

    def end_at(self, count: int) -> None:
        """Forgets all tokens after the first `count`, of those that were not reported: they came after the end."""
        open_runs, sure = self._open, self._sure
        self._cut(count)
        self._sure = min(sure, count)
        left = count - self._sure
        for tokens, label, engines in open_runs:
            if left > 0:
                self._open.append((min(tokens, left), label, engines))
            left -= tokens

    def report_due(self, now: float) -> None:
        """Reports at the pace that is asked for."""
        pace = self._pace
        if self._sure - self._told >= pace.tokens or now - self._reported >= pace.seconds:
            self.report(now)

    def report(self, now: float | None = None) -> None:
        """Tells the journal of what is new."""
        if self._sure > self._told:
            self._told = self._sure
            self._reported = self._desk.clock.now() if now is None else now
            self._journal(self)

    def after(self, tokens: int) -> Trajectory:
        """All of committed versions but the first tokens, as a partial trajectory."""
        return self._part(tokens, self._sure)

    def trajectory(self, finish: Finish, text: str) -> Trajectory:
        """All of it, ended so; with ABORT the tokens so far."""
        return self._part(0, len(self.ids) if self._spans else 0, finish, text)

    def _part(self, first: int, last: int, finish: Finish = Finish.ABORT, text: str = "") -> Trajectory:
        ids, logprobs, spans, engines = self.ids, self._logprobs, self._spans, self._engines
        if first or last < len(ids):
            ids, logprobs = ids[first:last], logprobs[first:last]
            spans, engines = _between(spans, first, last), _between(engines, first, last)
        count = len(ids)
        return Trajectory(
            tuple(ids),
            tuple(logprobs),
            (1,) * count if self._plain else tuple(self._mask[first:last]),
            VersionSpans(tuple(spans)),
            finish,
            text,
            Runs(tuple(engines)),
            self.seed,
            kv_mixed=(0,) * count if self._plain else tuple(self._mixed[first:last]),
            routed=self._routed_of(first, last),
        )

    def _routed_of(self, first: int, last: int) -> RoutedExperts:
        known = self._routed
        if not known.width or first == last:
            return ROUTED_NONE
        rest = missing(known.width, len(self.ids) - len(known))
        whole = RoutedExperts(known.width, known.prompt, known.rows + rest).cut(last)
        return whole.after(first) if first else whole

    def _cut(self, count: int) -> None:
        opening = self.opening
        self._spans = list(_between(self._spans, 0, count)) if count > opening else []
        count = max(count, opening)  # what the environment said stays said
        for kept in (self.ids, self._logprobs, self._mask, self._mixed):
            del kept[count:]
        self._engines = list(_between(self._engines, 0, count))
        self._routed = self._routed.cut(count)
        self._open = []


def _lengthen(runs: list[tuple[int, str]], tokens: int, label: str) -> None:
    if runs:
        before, last = runs[-1]
        if last == label:
            runs[-1] = before + tokens, label
            return
    if tokens:
        runs.append((tokens, label))


def _between(runs: list[tuple[int, str]], first: int, last: int) -> tuple[tuple[int, str], ...]:
    """The runs of the tokens `first` to `last` (exclusive)."""
    if len(runs) == 1:  # as nearly always
        inside = min(runs[0][0], last) - first
        return ((inside, runs[0][1]),) if inside > 0 else ()
    found: list[tuple[int, str]] = []
    at = 0
    for tokens, label in runs:
        inside = min(at + tokens, last) - max(at, first)
        if inside > 0:
            found.append((inside, label))
        at += tokens
    return tuple(found)
