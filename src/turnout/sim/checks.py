"""The invariants of docs/architecture.md, checked after a run from what the world knows (turnout.sim.record).

Promises: each check is independent of the code that it checks: what trained is read from the trainer's own history,
whether its tokens are right is computed anew from prompt, seed and weights. A check yields one Failure for each
thing that is wrong, and names group, step or version.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from turnout.core.events import (
    EvalDone,
    GroupCompleted,
    GroupDropped,
    GroupRequeued,
    GroupTaken,
    GroupTrained,
    RunStarted,
    VersionAborted,
    VersionCommitted,
    VersionPublished,
)
from turnout.core.rng import SeedTree
from turnout.core.types import Finish, RolloutGroup, TrainSample, Trajectory
from turnout.core.version import Runs, VersionSpans, label_counter
from turnout.observe.audit import audit
from turnout.observe.audit_log import of_kind
from turnout.rollout.book import samples_digest
from turnout.rollout.group_machine import OPEN, GroupState
from turnout.schedule.evaluations import EVAL_SEEDS
from turnout.sim.model import length_of, logprobs_of, number_of, tokens
from turnout.sim.record import Failure, WorldRecord
from turnout.sim.report import DOUBLED, INVARIANT, LOST, OVER_BOUND
from turnout.sim.rewards import Decoder, value_of

Check = Callable[[WorldRecord], Iterator[Failure]]


def every_prompt_has_one_end(record: WorldRecord) -> Iterator[Failure]:
    """Invariant 1, by the ledger: each ordinal was taken, each attempt that was requeued has a next one, the last
    one ended or is open."""
    attempts: dict[int, list[tuple[int, str, str | None]]] = defaultdict(list)
    for row in record.ledger:
        attempts[row.ordinal].append((row.attempt, row.state, row.cause))
    for ordinal in range(max(attempts, default=-1) + 1):
        found = sorted(attempts.get(ordinal, []))
        if [attempt for attempt, _, _ in found] != list(range(len(found))) or not found:
            yield Failure(LOST, f"prompt {ordinal}: its attempts in the ledger are {found}")
            continue
        if any(state != GroupState.REQUEUED for _, state, _ in found[:-1]):
            yield Failure(DOUBLED, f"prompt {ordinal} was tried again after an attempt that ended: {found}")
        if found[-1][1] == GroupState.REQUEUED:
            yield Failure(LOST, f"prompt {ordinal} was requeued and never tried again")
        if found[-1][1] == GroupState.DROPPED and not found[-1][2]:
            yield Failure(LOST, f"prompt {ordinal} was dropped without a reason")


def what_was_told_is_in_the_ledger(record: WorldRecord) -> Iterator[Failure]:
    """Invariant 1: every group that any life said it had taken has a row."""
    known = {row.group_id for row in record.ledger}
    for one in record.told:
        if isinstance(one.event, GroupTaken) and one.event.group not in known:
            yield Failure(LOST, f"group {one.event.group} was taken in life {one.life} and has no row")


def what_trained_is_what_the_ledger_says(record: WorldRecord) -> Iterator[Failure]:
    """Invariant 1, by the weights: each prompt is in the history of the final weights at most once, and exactly
    the groups that the ledger calls trained are."""
    if record.final_root is None:
        return
    ordinals, groups = Counter[int](), set[str]()
    for state in record.history.lineage(record.final_root)[1:]:
        assert state.batch is not None
        names = {sample.group_id for sample in state.batch.samples}
        groups |= names
        ordinals.update(int(name[1:9]) for name in names)
    for ordinal, times in ordinals.items():
        if times > 1:
            yield Failure(DOUBLED, f"prompt {ordinal} is {times} times in the final weights")
    said = {row.group_id for row in record.ledger if row.state == GroupState.TRAINED}
    for name in sorted(said - groups):
        yield Failure(LOST, f"group {name} is trained by the ledger, but not in the final weights")
    for name in sorted(groups - said):
        yield Failure(INVARIANT, f"group {name} is in the final weights, but not trained by the ledger")


def what_trained_is_whole_and_true(record: WorldRecord) -> Iterator[Failure]:
    """Invariants 2 and 3, for every step of the final weights and every token of it."""
    if record.final_root is None:
        return
    lineage = record.history.lineage(record.final_root)
    exported = {state.root: state.step for state in lineage}
    roots, committed = record.roots(), record.committed()
    for state in lineage[1:]:
        assert state.batch is not None
        step, members = state.step - 1, Counter[str]()
        for sample in state.batch.samples:
            members[sample.group_id] += 1
            where = f"step {step}, group {sample.group_id}"
            made = _origin(record, sample)
            if made is None:
                yield Failure(INVARIANT, f"{where}: a sample trained that was never stored as complete")
                continue
            yield from _whole(record, where, sample, made)
            yield from _true(where, sample, made, roots)
            yield from _fresh(record, f"{where}", (sample, made), (step, exported, roots, committed))
        for name, count in members.items():
            if not record.rules.min_group <= count <= record.rules.samples:
                yield Failure(INVARIANT, f"step {step}: group {name} trained with {count} members")


def _origin(record: WorldRecord, sample: TrainSample) -> Trajectory | None:
    """The stored trajectory that a sample was made of."""
    for group in record.stored.get(sample.group_id, ()):
        for member in group.trajectories:
            if member.response_ids == sample.response_ids:
                return member
    return None


def _whole(record: WorldRecord, where: str, sample: TrainSample, made: Trajectory) -> Iterator[Failure]:
    """Invariant 2; and a trajectory ends where the model ends it, or at its budget."""
    lengths = {len(sample.response_ids), len(sample.logprobs), len(sample.loss_mask), len(sample.advantages)}
    if lengths != {len(made.spans)}:
        yield Failure(INVARIANT, f"{where}: lengths {sorted(lengths)}, spans of {len(made.spans)}")
    if made.reward != value_of(Decoder().decode(made.response_ids)):
        yield Failure(INVARIANT, f"{where}: its reward is {made.reward}, the grader never said so")
    natural = length_of(sample.prompt_ids[1], made.seed, record.rules.median)
    expected = min(natural, record.rules.most_tokens)
    if len(sample.response_ids) != expected:
        got = len(sample.response_ids)
        yield Failure(
            INVARIANT,
            f"{where}: {got} tokens, its end is at {natural}, its budget {record.rules.most_tokens}",
        )


def _true(where: str, sample: TrainSample, made: Trajectory, roots: dict[str, str]) -> Iterator[Failure]:
    """Every token is what the weights of its span make of those before it."""
    spans = [(count, number_of(roots[label])) for count, label in made.spans.runs if label in roots]
    if tokens(sample.prompt_ids, made.seed, spans) != list(sample.response_ids):
        yield Failure(INVARIANT, f"{where}: tokens are not those of {made.spans.runs}")
    if logprobs_of(sample.response_ids) != list(sample.logprobs):
        yield Failure(INVARIANT, f"{where}: log-probs are not those of its tokens")


def _fresh(
    record: WorldRecord,
    where: str,
    pair: tuple[TrainSample, Trajectory],
    known: tuple[int, dict[str, int], dict[str, str], frozenset[str]],
) -> Iterator[Failure]:
    """Invariant 3: unmasked tokens are of committed versions, of weights that led to these, within the bound."""
    (sample, made), (step, exported, roots, committed) = pair, known
    first = 0
    for count, label in made.spans.runs:
        trains = any(sample.loss_mask[first : first + count])
        first += count
        if not trains:
            continue
        root = roots.get(label)
        if label not in committed:
            yield Failure(INVARIANT, f"{where}: trains tokens of {label}, never committed")
        elif root not in exported or exported[root] > step:
            yield Failure(
                INVARIANT, f"{where}: trains tokens of {label}, which did not lead to these weights"
            )
        elif step - exported[root] > record.rules.max_staleness:
            lag = step - exported[root]
            yield Failure(OVER_BOUND, f"{where}: trains tokens of {label}, lag {lag}")


def slots_are_kept(record: WorldRecord) -> Iterator[Failure]:
    """By the events of each life: never more groups admitted and not part of a committed version than slots."""
    for life in range(record.lives):
        charged: dict[str, int | None] = {}  # group -> step after which it trained
        published: dict[str, int] = {}
        resumed = False
        for one in record.told:
            if one.life != life:
                continue
            event = one.event
            if isinstance(event, RunStarted):
                resumed = event.resumed_at is not None
            elif isinstance(event, GroupTaken):
                charged[event.group] = None
                if len(charged) > record.rules.slots and not resumed:
                    text = (
                        f"life {life}, t={one.at:.1f}: {len(charged)} groups charged of {record.rules.slots}"
                    )
                    yield Failure(OVER_BOUND, text)
            elif isinstance(event, GroupDropped | GroupRequeued):
                charged.pop(event.group, None)
            elif isinstance(event, GroupTrained):
                charged[event.group] = event.step + 1
            elif isinstance(event, VersionPublished):
                published[event.version] = event.step
            elif isinstance(event, VersionCommitted) and event.version in published:
                done = published[event.version]
                charged = {g: at for g, at in charged.items() if at is None or at > done}


def the_window_is_kept(record: WorldRecord) -> Iterator[Failure]:
    """In a life without a resume: at most window - 1 groups of later prompts train before a group. One that began
    anew counts from the step after."""
    since: dict[str, int] = {}
    trained: list[tuple[int, str]] = []
    for one in record.told:
        if one.life == 0 and isinstance(one.event, GroupTaken):
            again = not one.event.group.endswith(".0")
            since[one.event.group] = one.event.step if again else -1
        elif one.life == 0 and isinstance(one.event, GroupTrained):
            trained.append((one.event.step, one.event.group))
    for step, group in trained:
        over = sum(since[group] < s < step and g > group for s, g in trained)
        if over > record.rules.window - 1:
            yield Failure(
                INVARIANT,
                f"{over} younger groups trained before {group}, the window is {record.rules.window}",
            )


def versions_rise_and_end_once(record: WorldRecord) -> Iterator[Failure]:
    """Invariant 4 over all lives: a number is given out once, and a version's label names its content."""
    last = 0
    for one in record.told:
        event = one.event
        if not isinstance(event, VersionPublished):
            continue
        if event.counter <= last:
            yield Failure(INVARIANT, f"{event.version} was published after number {last}")
        last = max(last, event.counter)
        if label_counter(event.version) != event.counter or not event.version.endswith(event.root[:16]):
            yield Failure(INVARIANT, f"{event.version} does not name {event.counter} and {event.root}")
        state = record.history.made.get(event.root)
        if state is None:
            yield Failure(INVARIANT, f"{event.version}: the trainer never had the weights {event.root}")
        elif state.step != event.step:
            yield Failure(
                INVARIANT, f"{event.version} says step {event.step}, its weights are of {state.step}"
            )


def logs_pass_the_audit(record: WorldRecord) -> Iterator[Failure]:
    """The production's own audit, over the log of all lives as one, which is what it reads after a run."""
    for rule, detail in audit([one.event for one in record.told]).failed:
        yield Failure(INVARIANT, f"{rule}: {detail}")


def steps_are_trained_again_as_recorded(record: WorldRecord) -> Iterator[Failure]:
    """Invariant 6: the same weights get the same batch, also after a resume, since it was recorded."""
    after: dict[str, str] = {}
    for state in record.history.steps:
        if state.batch is not None and after.setdefault(state.before, state.root) != state.root:
            yield Failure(INVARIANT, f"step {state.batch.step} was trained again from another batch")


def nobody_else_writes(record: WorldRecord) -> Iterator[Failure]:
    """One controller lives at a time: none may take another for the writer of its store."""
    for one in record.told:
        if isinstance(one.event, VersionAborted) and "somebody else" in one.event.reason:
            yield Failure(INVARIANT, f"life {one.life}: {one.event.reason}")


def points_are_of_their_version(record: WorldRecord) -> Iterator[Failure]:
    """A point is of a committed version, at its step; where no sample failed it is what the version's weights make
    of the held-out prompts, to the bit."""
    roots, committed = record.roots(), record.committed()
    for event in of_kind([one.event for one in record.told], EvalDone):
        where = f"point {event.name} of {event.version} at step {event.step}"
        root = roots.get(event.version, "")
        state = record.history.made.get(root)
        if event.version not in committed or state is None:
            yield Failure(INVARIANT, f"{where}: the version was never committed")
        elif state.step != event.step:
            yield Failure(INVARIANT, f"{where}: its weights are of step {state.step}")
        elif not event.failed and event.digest != _expected_point(record, event.name, root):
            yield Failure(INVARIANT, f"{where}: its tokens are not those of one version")


def _expected_point(record: WorldRecord, name: str, root: str) -> str:
    seeds, made = SeedTree(*EVAL_SEEDS), list[Trajectory]()
    assert record.evals is not None
    data = next(one for one in record.evals.sets if one.name == name)
    for prompt in data.prompts:
        seed = seeds.child(prompt.prompt_id, 0).seed
        count = min(length_of(prompt.token_ids[1], seed, record.rules.median), record.rules.most_tokens)
        ids = tuple(tokens(prompt.token_ids, seed, [(count, number_of(root))]))
        spans, engines = VersionSpans(((count, "v"),)), Runs(((count, "e"),))
        made.append(
            Trajectory(ids, tuple(logprobs_of(ids)), (1,) * count, spans, Finish.STOP, "", engines, seed)
        )
    return samples_digest(made)


def completed_groups_are_whole(record: WorldRecord) -> Iterator[Failure]:
    """Invariant 2 where it is said."""
    for one in record.told:
        if isinstance(one.event, GroupCompleted) and any(len(set(row)) > 1 for row in one.event.lengths):
            yield Failure(INVARIANT, f"group {one.event.group} is complete with lengths {one.event.lengths}")


def all_steps_were_done(record: WorldRecord) -> Iterator[Failure]:
    """A run that says it has finished has done its steps, of whole batches."""
    if record.final_root is None:
        return
    lineage = record.history.lineage(record.final_root)[1:]
    if len(lineage) != record.rules.steps:
        yield Failure(
            INVARIANT, f"{len(lineage)} steps made the final weights, asked were {record.rules.steps}"
        )


CHECKS: tuple[Check, ...] = (
    every_prompt_has_one_end,
    what_was_told_is_in_the_ledger,
    what_trained_is_what_the_ledger_says,
    what_trained_is_whole_and_true,
    slots_are_kept,
    the_window_is_kept,
    versions_rise_and_end_once,
    steps_are_trained_again_as_recorded,
    nobody_else_writes,
    points_are_of_their_version,
    logs_pass_the_audit,
    completed_groups_are_whole,
    all_steps_were_done,
)


def check(record: WorldRecord) -> list[Failure]:
    """All that is wrong with a run, what was seen on the way first."""
    return [*record.failures, *(failure for one in CHECKS for failure in one(record))]


def open_at_the_end(record: WorldRecord) -> list[str]:
    """Groups of the ledger that have not ended."""
    names = {state.value for state in OPEN}
    return [row.group_id for row in record.ledger if row.state in names]


def stored_in(record: WorldRecord, group: RolloutGroup) -> None:
    """A group was written as complete."""
    record.stored[group.group_id].append(group)
