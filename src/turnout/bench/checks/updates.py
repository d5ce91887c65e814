"""Checks of updates from disk: bit-equal to a fresh engine, labels and spans, no stale prefix, refusals."""

from __future__ import annotations

import asyncio

from turnout.bench.checks.swaps import serves, wanted
from turnout.bench.compare import equal
from turnout.bench.registry import CapabilityAbsent, CheckFailed, check, expect
from turnout.bench.replies import Reply, must, piece, refused, rows
from turnout.bench.target import Target, disk_body
from turnout.bench.versions import resharded

TRIES = 10


@check("versions")
async def label_is_set_and_told(t: Target) -> str:
    """/update_weight_version names what is served, in /model_info and replies, and touches no request."""
    first = t.versions[0].label
    async with t.flight(t.prompt(1), t.facts.lasting) as flight:
        await t.until_running(1)
        body = {"new_version": "kit-renamed", "abort_all_requests": False}
        await t.control("/update_weight_version", body)
        try:
            reply = await flight.reply()
            told = rows(await t.wire.get("/model_info"))["weight_version"]
            after = await t.generate(t.prompt(1), 2)
        finally:
            await t.control("/update_weight_version", {"new_version": first, "abort_all_requests": False})
    expect(reply.finish == "length", f"the running request ended as {reply.finish}")
    expect((told, after.version) == ("kit-renamed",) * 2, f"/model_info {told}, reply {after.version}")
    return "model_info and replies carry the new label; the running request went on"


@check("versions")
async def root_digest_is_attested(t: Target) -> str:
    """GET /weight_version tells the root digest of the live tensors: that of the model's folder."""
    row = rows(await t.wire.get("/weight_version"))
    version = t.versions[0]
    seen = (row["version"], row["root"])
    expect(seen == (version.label, version.root), f"version and root are {seen}")
    return f"root {version.root[:16]}, level {row.get('level')}, verified {row.get('verified')}"


@check("versions")
async def spans_over_an_in_place_update(t: Target) -> str:
    """weight_versions tells which version made each token of a request that an update ran into."""
    first, second = t.versions[0], t.versions[1]
    length = min(t.facts.long, 400)
    async with t.flight(t.prompt(5), length) as flight:
        await t.until_running(1)
        try:
            async with t.paused("in_place"):
                await t.load_version(second, flush_cache=False)
            reply = await flight.reply()
        finally:
            await t.load_version(first)
    if not reply.versions:
        raise CapabilityAbsent("meta_info has no weight_versions")
    spans_of(reply, [first.label, second.label])
    cut = reply.versions[0][2]
    whole = await t.generate(t.prompt(5), cut)
    told = equal([whole], [piece(reply, 0, cut)], t.facts.repeat_tolerance, "before the update")
    return f"{reply.versions[0][2]} tokens of the first, {length - cut} of the second version; {told}"


def spans_of(reply: Reply, labels: list[str]) -> None:
    """CheckFailed unless the spans cover the tokens without a gap and carry these labels in this order."""
    places = [0]
    for _, start, end in reply.versions:
        expect(start == places[-1] and end > start, f"spans with a gap: {reply.versions}")
        places.append(end)
    expect(places[-1] == len(reply.tokens), f"spans end at {places[-1]} of {len(reply.tokens)} tokens")
    seen = [label for label, _, _ in reply.versions]
    expect(seen == labels, f"spans carry {seen}, not {labels}")


@check("updates")
async def update_from_disk(t: Target) -> str:
    """After an update from disk eight prompts are answered as by a fresh engine on that version."""
    version = t.versions[1]
    await wanted(t, version)
    async with t.on(version):
        return await serves(t, version)


@check("updates")
async def update_from_many_files(t: Target) -> str:
    """The same from a checkpoint in several files with an index."""
    version = resharded(t.versions[1], t.work / "resharded")
    await wanted(t, t.versions[1])
    async with t.on(version):
        return f"{len(list(version.folder.glob('*.safetensors')))} files; {await serves(t, version)}"


@check("updates")
async def update_back_and_forth(t: Target) -> str:
    """Three versions loaded one after another, twice round, answer as themselves each time."""
    for version in t.versions:
        await wanted(t, version)
    told = ""
    for version in (*t.versions[1:], *t.versions):
        await t.load_version(version)
        told = await serves(t, version)
    await t.load_version(t.versions[0])
    return f"5 updates; the last: {told}"


@check("updates")
async def update_without_a_label(t: Target) -> str:
    """An update that names no version does not leave the old label on the new weights unsaid or untrue."""
    version = t.versions[1]
    body = disk_body(version)
    del body["weight_version"]
    try:
        await t.control("/update_weights_from_disk", body)
        reply = await t.generate(t.prompt(1), 4)
    finally:
        await t.load_version(t.versions[0])
    if reply.version == t.versions[0].label:
        if t.facts.ours:
            raise CheckFailed(f"the new weights answer under the old label {reply.version}")
        raise CapabilityAbsent("the old label stays on the new weights: who updates must name the version")
    return f"labelled {reply.version}"


@check("updates")
async def no_stale_prefix(t: Target) -> str:
    """After an update a prompt that was computed before is computed anew: 0 cached tokens, and the tokens of
    the new version."""
    return await _stale(t, flush=True)


@check("updates")
async def no_stale_prefix_in_place(t: Target) -> str:
    """The same after an in-place update without a flush, where running requests keep their old KV."""
    return await _stale(t, flush=False)


async def _stale(t: Target, flush: bool) -> str:
    """With stock SGLang and no flush only `extra_key` keeps versions apart; that is checked there."""
    version = t.versions[1]
    want = await wanted(t, version)
    prompts = t.prompts()
    longest = [*prompts[-1], *t.prompt(8001, 64)]
    keyed = {}
    for ids in (*prompts, longest):
        await t.generate(ids, 4)
    try:
        async with t.paused("in_place" if not flush else "retract"):
            await t.load_version(version, flush_cache=flush)
        reply = await t.generate(longest, 12)
        stale = reply.cached_tokens
        if stale and not flush and not t.facts.ours:
            keyed = {"extra_key": version.label}
            reply = await t.generate(longest, 12, **keyed)
        seen = await t.together([t.generate(ids, 12, **keyed) for ids in prompts])
    finally:
        await t.load_version(t.versions[0])
    expect(reply.cached_tokens == 0, f"{reply.cached_tokens} tokens of the old version's KV reused")
    told = equal(want, seen, t.facts.repeat_tolerance, "after the update")
    if keyed:
        return f"{stale} cached tokens without extra_key, 0 with the version in extra_key; {told}"
    return f"0 of {len(longest)} tokens cached; {told}"


@check("updates")
async def update_while_requests_run(t: Target) -> str:
    """An update without a pause loses no request: each ends to its full length, spans in order."""
    first, second = t.versions[0], t.versions[1]
    await wanted(t, second)
    length = t.facts.lasting
    flying = [asyncio.ensure_future(t.generate(ids, length)) for ids in t.prompts(6)]
    try:
        await t.until_running(1)
        # SGLang lets them finish first, and without a flush answers these very prompts from their old KV.
        await t.load_version(second, flush_cache=not t.facts.ours)
        told = await serves(t, second)
        replies = list(await asyncio.gather(*flying))
    finally:
        await asyncio.wait(flying)
        await t.load_version(first)
    expect({len(r.tokens) for r in replies} == {length}, f"lengths {[len(r.tokens) for r in replies]}")
    crossed = sum(len(r.versions) == 2 for r in replies)
    for reply in replies:
        if reply.versions:
            labels = [label for label, _, _ in reply.versions]
            expect(labels in ([first.label], [first.label, second.label], [second.label]), f"spans {labels}")
            spans_of(reply, labels)
    return f"6 of 6 to their {length} tokens, {crossed} over both versions; {told}"


@check("updates")
async def updates_under_load(t: Target) -> str:
    """Requests come all the time while four updates happen: none is lost, and every token's label is one that
    was served between the request's begin and end, in the order served."""
    served: list[tuple[float, str]] = [(t.clock.now(), t.versions[0].label)]
    stop = False
    replies: list[tuple[float, float, Reply]] = []

    async def client(number: int) -> None:
        while not stop:
            begun = t.clock.now()
            reply = await t.generate(t.prompt(number, 8 + number), 24)
            replies.append((begun, t.clock.now(), reply))

    clients = [asyncio.ensure_future(client(number)) for number in range(4)]
    try:
        for at in (1, 2, 1, 0):
            await t.clock.sleep(30 * t.facts.token_s)
            served.append((t.clock.now(), t.versions[at].label))
            await t.load_version(t.versions[at], flush_cache=False)
        await t.clock.sleep(30 * t.facts.token_s)
    finally:
        stop = True
        await asyncio.gather(*clients)
        await t.load_version(t.versions[0])
    for begun, ended, reply in replies:
        expect((len(reply.tokens), reply.finish) == (24, "length"), f"a request ended as {reply.finish}")
        allowed = labels_between(served, begun, ended)
        seen = [label for label, _, _ in reply.versions] or [reply.version]
        expect(_in_order(seen, allowed), f"a request was made by {seen} while {allowed} were served")
    mixed = sum(len(reply.versions) > 1 for _, _, reply in replies)
    return f"{len(replies)} requests of 24 tokens over 4 updates, none lost, {mixed} over several versions"


def labels_between(served: list[tuple[float, str]], begun: float, ended: float) -> list[str]:
    """Labels that may make a token between these times. `served` holds (when its update was begun, label); an
    update may take effect at any time after that, so the label before counts until the next one's."""
    first = max(at for at, (when, _) in enumerate(served) if when <= begun or at == 0)
    return [label for at, (when, label) in enumerate(served) if at >= first - 1 and when <= ended]


def _in_order(seen: list[str], allowed: list[str]) -> bool:
    """Whether `seen` is a subsequence of `allowed`."""
    rest = iter(allowed)
    return all(any(label == other for other in rest) for label in seen)


@check("updates")
async def update_while_another_runs(t: Target) -> str:
    """Of two updates at once one is refused with 409, the other serves. On a busy machine the second may come when
    the first has ended: it is tried TRIES times."""
    bodies = [disk_body(t.versions[1]), disk_body(t.versions[2])]

    async def both() -> list[int]:
        calls = (t.wire.post("/update_weights_from_disk", body) for body in bodies)
        return [answer.status for answer in await asyncio.gather(*calls)]

    try:
        statuses = await both()
        for _ in range(TRIES - 1):
            if statuses == [200, 200]:
                statuses = await both()
        if statuses == [200, 200]:
            if not t.facts.ours:
                raise CapabilityAbsent("two updates at once are queued: both answered 200")
            raise CheckFailed("two updates at once both answered 200")
        expect(sorted(statuses) == [200, 409], f"statuses {statuses}")
        version = t.versions[1 + statuses.index(200)]
        told = await serves(t, version)
    finally:
        await t.load_version(t.versions[0])
    return f"200 and 409; {told}"


@check("updates")
async def update_aborts_when_asked(t: Target) -> str:
    """abort_all_requests ends what runs before the new weights answer."""
    try:
        async with t.flight(t.prompt(1), t.facts.long) as flight:
            await t.until_running(1)
            await t.load_version(t.versions[1], abort_all_requests=True)
            reply = await flight.reply()
    finally:
        await t.load_version(t.versions[0])
    expect(reply.finish == "abort", f"finish_reason is {reply.finish}")
    labels = {label for label, _, _ in reply.versions} or {reply.version}
    expect(t.versions[1].label not in labels, "an aborted request holds tokens of the new version")
    return f"abort with {len(reply.tokens)} tokens of the old version"


@check("updates")
async def prepare_and_activate(t: Target) -> str:
    """Preparing an update changes nothing; activating it is the update; an id counts once."""
    version = t.versions[1]
    body = {"model_path": str(version.folder), "weight_version": version.label}
    await wanted(t, version)
    prepared = await t.control("/prepare_weights", body)
    told = await serves(t, t.versions[0])
    expect(prepared.get("root") == version.root, f"prepared root {prepared.get('root')}")
    call = {"prepared_id": prepared["prepared_id"], "abort_all_requests": False, "flush_cache": True}
    try:
        await t.control("/activate_weights", call)
        told = await serves(t, version)
        again = await t.wire.post("/activate_weights", call)
        unknown = await t.wire.post("/activate_weights", call | {"prepared_id": "kit-nothing"})
    finally:
        await t.load_version(t.versions[0])
    expect(400 <= unknown.status < 500, f"an unknown prepared_id answered {unknown.status}")
    expect(400 <= again.status < 500, f"a prepared_id used twice answered {again.status}")
    return f"unchanged until activated; {told}"


@check("updates")
async def version_constraints(t: Target) -> str:
    """extra_key is a version: the least one accepted, with ! the only one; unmet is a 409 that says what is
    served."""
    version, newer = t.versions[1], "v000009-0123456789abcdef"
    older = t.versions[2].label.replace("v000002", "v000000")
    async with t.on(version):
        unmet = await t.ask(t.prompt(1), 2, extra_key=newer)
        if unmet.status == 200:
            raise CapabilityAbsent("extra_key names a cache namespace only: an unmet version answered 200")
        wrong = await t.ask(t.prompt(1), 2, extra_key=f"{older}!")
        for answer in (unmet, wrong):
            expect(answer.status == 409, f"an unmet version answered {answer.status}")
            expect(
                version.label in answer.message, f"the 409 does not name {version.label}: {answer.message}"
            )
        for key in (version.label, f"{version.label}!", older):
            must(await t.ask(t.prompt(1), 2, extra_key=key))
    return f"200 for equal, exact and lower, 409 for {newer} and an exact other one"


@check("updates")
async def version_of_a_lying_label(t: Target) -> str:
    """A label of the weight store's form that names other content is refused."""
    lie = t.versions[2].label
    answer = await t.wire.post(
        "/update_weights_from_disk", disk_body(t.versions[1]) | {"weight_version": lie}
    )
    if answer.status == 200:
        await t.load_version(t.versions[0])
        raise CapabilityAbsent(f"{lie} was taken for other content: labels are free text")
    return refused(answer)[:160]
