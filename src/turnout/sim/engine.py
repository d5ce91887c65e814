"""A virtual engine: what it holds and computes, and the HTTP answers of its control calls. Knows no network.

Owns its weights (root digest and label), prepared sets, running and waiting requests, KV space and prefix cache.
It goes on by timers of the world, whoever is killed. Promises: tokens are those of turnout.sim.model for the
weights that it holds when it makes them; a request that outgrows the KV space is put back and keeps its tokens;
when it dies everything is gone and it starts with the checkpoint's weights under the name "default".
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnout.core.types import Finish
from turnout.core.version import VersionConstraint, VersionSpans
from turnout.protocol.sglang import GenerateReply, GenerateRequest
from turnout.protocol.stream import PartialReply
from turnout.serving.roster import WorkerType
from turnout.sim.model import STALE, EngineShape, logprobs_of, next_tokens, number_of
from turnout.sim.pairs import Rooms

Row = dict[str, Any]
CACHED_PROMPTS = 64


class Scheduler(Protocol):
    """Timers of the world."""

    def later(self, seconds: float, call: Callable[..., object], *args: Any) -> Any: ...


class Reader(Protocol):
    """Who reads a stream. A fault is the text of a cut connection."""

    def put(self, item: PartialReply | GenerateReply) -> None: ...

    def cut(self, reason: str) -> None: ...


@dataclass(eq=False)
class Run:
    """One request in the engine. `computed`: the root that its KV was computed with; `stale`: that of the prompt's
    KV as it was found in the cache, None: computed anew."""

    request: GenerateRequest
    reader: Reader
    ends_at: int
    ids: list[int] = field(default_factory=list[int])
    spans: VersionSpans = field(default_factory=VersionSpans)
    mixed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    computed: str = ""
    stale: str | None = None
    cached: bool = False
    moved: bool = False  # its KV came from a prefill engine, and is not yet in use
    epoch: int = 0  # grows when its timer is void
    size: int = field(init=False)  # its tokens, as the KV space counts them

    def __post_init__(self) -> None:
        self.size = len(self.request.input_ids)


class VirtualEngine:
    """See the module. `process` counts its starts; `slowed` multiplies how long everything takes."""

    half: WorkerType
    rooms: Rooms | None  # of a half of PD pairs

    def __init__(self, name: str, shape: EngineShape, base_root: str, timers: Scheduler) -> None:
        self.name, self.shape, self._base, self._timers = name, shape, base_root, timers
        self.process, self.slowed = 0, 1.0
        self.alive = False
        self.half, self.rooms = WorkerType.REGULAR, None
        self.start()

    def start(self) -> None:
        """A new process, with the checkpoint's weights."""
        self.alive, self.process = True, self.process + 1
        self.root, self.label = self._base, "default"
        self.prepared: tuple[str, str, str] | None = None  # id, root, label
        self.paused = self.updating = False
        self.running: dict[str, Run] = {}
        self._waiting: deque[Run] = deque()
        self._apart: dict[str, Run] = {}  # in a room: without KV yet, or with KV for the other half
        self._prefixes: OrderedDict[tuple[str | None, tuple[int, ...]], str] = OrderedDict()
        self.retracted = 0

    def die(self) -> None:
        """Everything it had is gone; whoever reads a stream of it sees the connection cut."""
        self.alive = False
        gone = self._all()
        self.running, self._waiting, self._apart = {}, deque(), {}
        for run in gone:
            run.epoch += 1
            self._left(run, "the other half is gone")
            run.reader.cut("connection reset by peer")

    @property
    def load(self) -> int:
        return len(self.running) + len(self._waiting) + len(self._apart)

    def _all(self) -> list[Run]:
        return [*self.running.values(), *self._waiting, *self._apart.values()]

    def _named(self, rid: str) -> list[Run]:
        """The requests of this name."""
        apart = [runs[rid] for runs in (self.running, self._apart) if rid in runs]
        return [*apart, *(run for run in self._waiting if run.request.rid == rid)]

    # requests

    def generate(self, request: GenerateRequest, reader: Reader) -> tuple[int, str] | None:
        """Takes a request; else the status and why it is refused."""
        if self.paused and self.load >= 4 * self.shape.running:
            return 503, "the queue is full"
        if self._named(request.rid):
            return 400, f"request {request.rid} is running already"
        least = None if request.extra_key is None else VersionConstraint.parse(request.extra_key)
        if least is not None and not least.met_by(self.label):
            return 409, self.label
        length, prompt = request.input_ids[0], request.input_ids[1]
        seed = request.params.sampling_seed
        total = length + self.shape.length(prompt, 0 if seed is None else seed)
        run = Run(request, reader, total)
        if self.half is WorkerType.DECODE:
            self._meets(run, made=False)
        else:
            self._waiting.append(run)
        self._fill()
        return None

    def _meets(self, run: Run, made: bool) -> None:
        """It waits for its other half."""
        assert run.request.bootstrap is not None and self.rooms is not None, (
            "a half of a pair is asked with a room"
        )
        self._apart[run.request.rid] = run
        self.rooms.came(run.request.bootstrap.room, self, run, made)

    def ended(self, run: Run, finish: Finish, message: str) -> None:
        """See turnout.sim.pairs."""
        if self._apart.get(run.request.rid) is run:
            self._end(run, finish, message)
            self._fill()

    def arrived(self, run: Run, made: Run) -> None:
        """See turnout.sim.pairs."""
        if self._apart.get(run.request.rid) is run:
            del self._apart[run.request.rid]
            run.computed, run.stale, run.cached, run.moved = made.computed, made.stale, made.cached, True
            if made.ids:
                self._told(run, list(made.ids))
            self._waiting.append(run)
            self._fill()

    def _left(self, run: Run, why: str) -> None:
        """It ends here: so does its other half, where that is still needed."""
        if run.request.bootstrap is not None and self.rooms is not None:
            self.rooms.over(run.request.bootstrap.room, why)

    def abort(self, rid: str | None, message: str) -> int:
        """Ends one request, or all (None), at a token boundary; how many."""
        found = self._all() if rid is None else self._named(rid)
        for run in found:
            self._end(run, Finish.ABORT, message)
        self._fill()
        return len(found)

    def _fill(self) -> None:
        while not self.paused and self._waiting and len(self.running) < self.shape.running:
            if self.running and self._kv() + self._waiting[0].size > 0.9 * self.shape.kv_tokens:
                return
            run = self._waiting.popleft()
            self.running[run.request.rid] = run
            if not run.moved or run.computed != self.root:
                self._prefill(run)
            run.moved = False
            self._schedule(run)

    def _prefill(self, run: Run) -> None:
        """Finds the prompt's KV as a prefix cache does that could not be flushed since requests were running. A
        version in `extra_key` is the least one asked for: what is served names the cache then, which keeps versions
        apart. Without one nothing does."""
        request = run.request
        asked = None if request.extra_key is None else VersionConstraint.parse(request.extra_key)
        namespace = request.extra_key if asked is None else self.label
        key = (namespace, request.input_ids[: request.input_ids[0]])
        found = self._prefixes.get(key)
        run.cached, run.computed = found is not None, self.root
        run.stale = found if found is not None and found != self.root else None
        self._prefixes[key] = self.root if found is None else found
        if len(self._prefixes) > CACHED_PROMPTS:
            self._prefixes.popitem(last=False)

    def _schedule(self, run: Run) -> None:
        run.epoch += 1
        seconds = self.slowed * self.shape.event_s(len(self.running))
        self._timers.later(seconds, self._advance, run, run.epoch)

    def _advance(self, run: Run, epoch: int) -> None:
        if epoch != run.epoch or run.request.rid not in self.running or self.paused:
            return
        request = run.request
        at = len(request.input_ids) + len(run.ids)
        budget = request.params.max_new_tokens - len(run.ids)
        most = 1 if self.half is WorkerType.PREFILL else self.shape.chunk
        count = max(0, min(most, budget, run.ends_at - at))
        before = run.ids[-1] if run.ids else request.input_ids[-1]
        root = number_of(self.root) ^ (0 if run.stale is None else STALE ^ number_of(run.stale))
        seed = request.params.sampling_seed
        new = next_tokens(before, 0 if seed is None else seed, at, root, count)
        if self.half is WorkerType.PREFILL:
            run.ids, run.spans, run.size = new, run.spans.extended(count, self.label), run.size + count
            del self.running[request.rid]
            self._meets(run, made=True)
            self._fill()
            return
        if count:
            self._told(run, new)
        if at + count >= run.ends_at:
            self._end(run, Finish.STOP, "")
        elif count == budget:
            self._end(run, Finish.LENGTH, "")
        else:
            self._schedule(run)
            self._make_room()
        self._fill()

    def _told(self, run: Run, new: list[int]) -> None:
        first = len(run.ids)
        run.ids += new
        run.size += len(new)
        run.spans = run.spans.extended(len(new), self.label)
        mixed = int(run.computed != self.root)
        if mixed:
            run.mixed.append((first, len(run.ids)))
        labels = ((len(new), self.label),)
        run.reader.put(
            PartialReply(tuple(new), tuple(logprobs_of(new)), labels, (mixed,) * len(new), self.name)
        )

    def _make_room(self) -> None:
        """Puts the youngest back until what runs fits; it keeps its tokens and is computed anew later."""
        while len(self.running) > 1 and self._kv() > self.shape.kv_tokens:
            _, youngest = self.running.popitem()
            youngest.epoch += 1
            self.retracted += 1
            self._waiting.appendleft(youngest)

    def _end(self, run: Run, finish: Finish, message: str) -> None:
        run.epoch += 1
        self.running.pop(run.request.rid, None)
        self._apart.pop(run.request.rid, None)
        self._left(run, f"the other half ended: {message}")
        if run in self._waiting:
            self._waiting.remove(run)
        ids = tuple(run.ids)
        length = run.request.input_ids[0]
        cached = length if run.cached else 0
        lengths = (len(run.request.input_ids), cached)
        whole = tuple(logprobs_of(ids)), finish, message, run.spans.runs, *lengths, tuple(run.mixed)
        run.reader.put(GenerateReply("", ids, *whole))

    def _kv(self) -> int:
        return sum([run.size for run in self.running.values()])

    # control calls: the body of a call -> status and row

    def answer(self, path: str, body: Row | None, other: bool) -> tuple[int, Row]:
        """One control call, done now. `other`: weights are loaded wrong."""
        handler = self._HANDLERS.get(path)
        if handler is None:
            return 404, {"error": {"message": f"no {path} here"}}
        return handler(self, body if body is not None else {}, other)

    def _info(self, body: Row, other: bool) -> tuple[int, Row]:
        del body, other
        return 200, {
            "engine": "turnout",
            "max_total_num_tokens": self.shape.kv_tokens,
            "max_running_requests": self.shape.running,
        }

    def _loads(self, body: Row, other: bool) -> tuple[int, Row]:
        del body, other
        used = self._kv()
        return 200, {
            "loads": [
                {
                    "num_running_reqs": len(self.running),
                    "num_waiting_reqs": len(self._waiting),
                    "num_total_reqs": self.load,
                    "num_used_tokens": used,
                    "max_total_num_tokens": self.shape.kv_tokens,
                    "token_usage": used / self.shape.kv_tokens,
                }
            ]
        }

    def _version(self, body: Row, other: bool) -> tuple[int, Row]:
        del body, other
        return 200, {"version": self.label, "root": self.root, "level": "memory"}

    def _rename(self, body: Row, other: bool) -> tuple[int, Row]:
        del other
        label = str(body["new_version"])
        if not label.endswith(self.root[:16]):
            return 400, {"success": False, "message": f"{label} names other weights"}
        self.label = label
        return 200, {"success": True}

    def _prepare(self, body: Row, other: bool) -> tuple[int, Row]:
        root = "f" * 32 if other else str(body["model_path"])
        made = f"{self.name}-{self.process}-{body['weight_version']}"
        self.prepared = made, root, str(body["weight_version"])
        return 200, {"success": True, "prepared_id": made, "version": body["weight_version"], "root": root}

    def _activate(self, body: Row, other: bool) -> tuple[int, Row]:
        del other
        if self.prepared is None or self.prepared[0] != body["prepared_id"]:
            return 400, {"success": False, "message": "no such set is prepared"}
        if body["abort_all_requests"]:
            self.abort(None, "aborted by an update")
        elif body["flush_cache"]:
            self._retract()
        _, self.root, self.label = self.prepared
        self._fill()
        return 200, {"success": True, "version": self.label, "root": self.root}

    def _load(self, body: Row, other: bool) -> tuple[int, Row]:
        self.root, self.label = ("f" * 32 if other else str(body["model_path"])), str(body["weight_version"])
        return 200, {"success": True, "version": self.label, "root": self.root}

    def _abort(self, body: Row, other: bool) -> tuple[int, Row]:
        del other
        rid = None if body.get("abort_all") else str(body["rid"])
        return 200, {"aborted": self.abort(rid, "aborted by a call")}

    def _pause(self, body: Row, other: bool) -> tuple[int, Row]:
        del other
        held, mode = self.load, body.get("mode", "abort")
        if mode == "abort":
            self.abort(None, "aborted by a pause")
        elif mode == "retract":
            self._retract()
        self.paused = True
        return 200, {"message": "paused", "status": "ok", "requests": held}

    def _retract(self) -> None:
        """Puts what runs back: it keeps its tokens, and is computed anew."""
        for run in reversed(self.running.values()):
            run.epoch += 1
            self._waiting.appendleft(run)
        self.running = {}

    def _continue(self, body: Row, other: bool) -> tuple[int, Row]:
        del body, other
        self.paused = False
        for run in list(self.running.values()):
            self._schedule(run)
        self._fill()
        return 200, {"message": "generation goes on", "status": "ok"}

    def _fine(self, body: Row, other: bool) -> tuple[int, Row]:
        del body, other
        return 200, {"status": "ok"}

    _HANDLERS: dict[str, Callable[[VirtualEngine, Row, bool], tuple[int, Row]]] = {  # noqa: RUF012
        "/health": _fine,
        "/server_info": _info,
        "/v1/loads": _loads,
        "/weight_version": _version,
        "/update_weight_version": _rename,
        "/prepare_weights": _prepare,
        "/activate_weights": _activate,
        "/update_weights_from_disk": _load,
        "/abort_request": _abort,
        "/pause_generation": _pause,
        "/continue_generation": _continue,
        "/flush_cache": _fine,
    }


CHANGES = frozenset(
    {"/prepare_weights", "/activate_weights", "/update_weights_from_disk", "/update_weight_version"}
)
