"""Groups: how many stand where, why some were dropped, and the whole history of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from turnout.cli.answers.run import Answer, Run, clock_time
from turnout.core.errors import InvariantBroken
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger_check import problems
from turnout.rollout.ledger_rows import GroupRow

ENDS = (GroupState.DROPPED, GroupState.REQUEUED)


def summary(run: Run) -> Answer:
    ledger = run.ledger
    counts = ledger.count_states()
    versions: dict[str, list[str]] = {}
    for version in ledger.versions():
        versions.setdefault(version.state, []).append(version.label)
    return {
        "run_id": ledger.meta("run_id"),
        "incarnation": ledger.last_owner(),
        "groups": counts.total(),
        "prompts": ledger.next_ordinal(),
        "by_state": {state.value: counts[state] for state in GroupState if counts[state]},
        "last_batch": ledger.last_batch(),
        "versions": {
            state: {"count": len(labels), "last": labels[-1]} for state, labels in sorted(versions.items())
        },
        "checkpoints": ledger.checkpoint_steps(),
    }


def summary_lines(told: Answer) -> Iterator[str]:
    yield f"run {told['run_id'] or 'without an id'}, incarnation {told['incarnation']}"
    yield f"{told['groups']} groups of {told['prompts']} prompts"
    for state, count in told["by_state"].items():
        yield f"  {state:<10} {count}"
    last = told["last_batch"]
    yield f"last batch: {'none' if last is None else f'step {last}'}"
    for state, of in told["versions"].items():
        yield f"versions {state}: {of['count']}, the last is {of['last']}"
    if told["checkpoints"]:
        yield f"checkpoints at steps {', '.join(map(str, told['checkpoints'][-5:]))}"


def why(run: Run) -> Answer:
    """Groups that ended untrained, by state and reason, the most frequent first."""
    told: Answer = {}
    for state in ENDS:
        causes = run.ledger.causes(state)
        ordered = sorted(causes.items(), key=lambda pair: (-pair[1], str(pair[0])))
        told[state.value] = {"groups": causes.total(), "causes": dict(ordered)}
    return told


def why_lines(told: Answer) -> Iterator[str]:
    for state, of in told.items():
        yield f"{of['groups']} groups {state}"
        for cause, count in of["causes"].items():
            yield f"  {count:>8}  {cause}"


def check(run: Run) -> Answer:
    """Reads all of the ledger."""
    return {"problems": list(problems(run.ledger)), "groups": run.ledger.count_states().total()}


def check_lines(told: Answer) -> Iterator[str]:
    """Raises InvariantBroken after the lines where there are problems."""
    yield from told["problems"]
    if told["problems"]:
        raise InvariantBroken(f"the ledger breaks its promises in {len(told['problems'])} places")
    yield f"{told['groups']} groups, every history and every token in order"


def group(run: Run, wanted: str) -> Answer:
    """All attempts that `wanted` names; raises ConfigError."""
    return {"groups": [_one(run, run.ledger.row(name)) for name in run.ids(wanted)]}


def _one(run: Run, row: GroupRow) -> Answer:
    pieces = run.ledger.pieces(row.group_id)
    members = sorted({piece["member"] for piece in pieces})
    return {
        "group": row.group_id,
        "attempt": row.attempt,
        "prompt": row.prompt_id,
        "state": row.state.value,
        "cause": row.cause,
        "trained": row.trained,
        "history": [asdict(move) for move in run.ledger.history(row.group_id)],
        "stored": run.ledger.is_stored(row.group_id) if pieces else None,
        "members": [
            _member(run, row, [piece for piece in pieces if piece["member"] == member]) for member in members
        ],
    }


def _member(run: Run, row: GroupRow, pieces: Sequence[dict[str, Any]]) -> Answer:
    runs = [(tokens, name) for piece in pieces for tokens, name in piece["versions"]]
    engines = [(tokens, name) for piece in pieces for tokens, name in piece["engines"]]
    return {
        "member": pieces[-1]["member"],
        "tokens": sum(tokens for tokens, _ in runs),
        "finish": pieces[-1]["finish"],
        "reward": pieces[-1]["reward"],
        "versions": [
            {"first": first, "last": stop - 1, **version_of(run, name, row.trained)}
            for first, stop, name in ranges(runs)
        ],
        "engines": [
            {"first": first, "last": stop - 1, "engine": name} for first, stop, name in ranges(engines)
        ],
    }


def version_of(run: Run, label: str, trained: int | None) -> Answer:
    """A version as tokens name it; `lag`: their age in the step that trained them."""
    row = run.versions.get(label)
    if row is None:
        return {"version": label, "state": None, "train_steps": None, "lag": None}
    lag = None if trained is None else trained - row.step
    return {"version": label, "state": row.state, "train_steps": row.step, "lag": lag}


def version_text(told: Answer) -> str:
    if told["state"] is None:
        return told["version"]
    lag = "" if told["lag"] is None else f", lag {told['lag']}"
    return f"{told['version']} ({told['state']}, of {told['train_steps']} train steps{lag})"


def ranges(runs: Sequence[tuple[int, str]]) -> list[tuple[int, int, str]]:
    """(first token, one after the last, name) of runs, neighbours of one name as one."""
    found: list[tuple[int, int, str]] = []
    at = 0
    for tokens, name in runs:
        if found and found[-1][2] == name:
            found[-1] = (found[-1][0], at + tokens, name)
        elif tokens:
            found.append((at, at + tokens, name))
        at += tokens
    return found


def group_lines(told: Answer) -> Iterator[str]:
    for one in told["groups"]:
        yield f"group {one['group']}: attempt {one['attempt']} at prompt {one['prompt']}, {state_text(one)}"
        for move in one["history"]:
            step = "" if move["step"] is None else f", step {move['step']}"
            cause = f": {move['cause']}" if move["cause"] else ""
            event = f"{clock_time(move['at'])}  {move['event']:<8} -> {move['state']:<9}"
            yield f"  {event} incarnation {move['incarnation']}{step}{cause}"
        if one["members"]:
            yield f"  tokens {'are stored' if one['stored'] else 'are forgotten'}"
        for member in one["members"]:
            yield from _member_lines(member)


def state_text(one: Answer) -> str:
    if one["trained"] is not None:
        return f"trained by step {one['trained']}"
    return one["state"] + (f" ({one['cause']})" if one["cause"] else "")


def _member_lines(member: Answer) -> Iterator[str]:
    end = "not ended" if member["finish"] == "abort" else f"ended by {member['finish']}"
    scored = "unscored" if member["reward"] is None else f"reward {member['reward']:g}"
    yield f"  member {member['member']}: {member['tokens']} tokens, {end}, {scored}"
    for part in member["versions"]:
        yield f"    tokens {part['first']}-{part['last']}: {version_text(part)}"
    engines = (f"{part['engine']} ({part['first']}-{part['last']})" for part in member["engines"])
    yield "    made by " + ", ".join(engines)
