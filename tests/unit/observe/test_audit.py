"""Every rule of the audit finds the violation that is planted for it, and is silent on a right log."""

from __future__ import annotations

from dataclasses import replace

import pytest

from turnout.core.events import (
    EngineFenced,
    EngineLost,
    EngineReady,
    GroupCompleted,
    GroupCut,
    GroupDropped,
    GroupRequeued,
    GroupResumed,
    GroupTaken,
    GroupTrained,
    ModelAttested,
    RunEnded,
    RunStarted,
    StepTrained,
    VersionAborted,
    VersionAttested,
    VersionCommitted,
    VersionPrepared,
    VersionPublished,
)
from turnout.core.version import WeightVersion
from turnout.observe.audit import MAX_DETAILS, RULES, audit, count_groups
from turnout.observe.audit_models import models_summary
from turnout.observe.audit_versions import commits_are_attested

ENGINES = ["engine-0", "engine-1"]


def root(counter: int) -> str:
    return f"{counter:032x}"[::-1]


def label(counter: int) -> str:
    return f"v{counter:06d}-{root(counter)[:16]}"


def group(name: str, step: int, version: int) -> list:
    return [
        GroupTaken(name, f"p-{name}", step),
        GroupCompleted(name, [[3, 3, 3, 3], [5, 5, 5, 5]], [label(version)], [0.0, 1.0]),
    ]


def step(number: int) -> list:
    """Step `number` (from 0) trains two groups with version `number` and makes the next one."""
    names = [f"g{number}a", f"g{number}b"]
    made = number + 1
    return [
        *group(names[0], number, number),
        *group(names[1], number, number),
        GroupTaken(f"g{number}x", "p", number),
        GroupDropped(f"g{number}x", "reward timed out"),
        *(GroupTrained(name, number, [label(number)], 0) for name in names),
        StepTrained(number, 2, 16, 1, [[0, 16]]),
        VersionPublished(label(made), 1, made, root(made), made, 1000, ENGINES),
        *(VersionPrepared(engine, label(made)) for engine in ENGINES),
        *(VersionAttested(engine, label(made), root(made), "memory") for engine in ENGINES),
        VersionCommitted(label(made)),
    ]


def good(steps: int = 3) -> list:
    return [
        RunStarted("run", 1, 7, "sync", 0),
        *(EngineReady(engine, "http://x", 1, "none") for engine in ENGINES),
        *(VersionAttested(engine, label(0), root(0), "memory") for engine in ENGINES),
        VersionCommitted(label(0)),
        *(event for number in range(steps) for event in step(number)),
        RunEnded("ok", "", []),
    ]


def find(log: list, kind: type, at: int = 0) -> int:
    return [index for index, event in enumerate(log) if isinstance(event, kind)][at]


def changed(log: list, kind: type, at: int = 0, **fields) -> list:
    index = find(log, kind, at)
    return [*log[:index], replace(log[index], **fields), *log[index + 1 :]]


def without(log: list, kind: type, at: int = 0) -> list:
    index = find(log, kind, at)
    return log[:index] + log[index + 1 :]


def inserted(log: list, kind: type, *events, at: int = 0) -> list:
    """`events` before the `at`-th event of a kind."""
    index = find(log, kind, at)
    return [*log[:index], *events, *log[index:]]


def frozen(number: int) -> ModelAttested:
    return ModelAttested("judge-0", "judge", root(number), "memory")


def fenced_on_the_way(log: list) -> list:
    """The first update loses engine-1 after it was prepared; it attests the version once that is committed."""
    at, end = find(log, VersionAttested, 3), find(log, VersionCommitted, 1) + 1
    fenced = EngineFenced(ENGINES[1], label(1), "died")
    return [*log[:at], fenced, *log[at + 1 : end], log[at], *log[end:]]


def died(log: list) -> list:
    """The log of a run that was killed before its first train step."""
    return log[: find(log, GroupTrained)]


PLANTED = [
    ("log_opens_and_closes_once", lambda log: log[1:], "not RunStarted"),
    ("log_opens_and_closes_once", lambda log: [*log, GroupTaken("late", "p", 9)], "follow RunEnded"),
    ("log_opens_and_closes_once", lambda log: [log[0], *log], "incarnation 1 is followed by"),
    ("each_group_ends_once", lambda log: without(log, GroupTrained), "g0a is lost"),
    ("each_group_ends_once", lambda log: without(log, GroupDropped), "g0x is lost"),
    ("each_group_ends_once", lambda log: inserted(log, RunEnded, GroupDropped("g0a", "x")), "ended 2 times"),
    ("each_group_ends_once", lambda log: inserted(log, RunEnded, GroupDropped("ghost", "x")), "never taken"),
    ("each_group_ends_once", lambda log: inserted(log, RunEnded, GroupTaken("g0a", "p", 0)), "taken twice"),
    (
        "each_group_ends_once",
        lambda log: inserted(log, StepTrained, log[find(log, GroupTrained)]),
        "trained, trained",
    ),
    ("trained_groups_were_completed", lambda log: without(log, GroupCompleted), "before it was complete"),
    (
        "trained_groups_were_completed",
        lambda log: inserted(log, GroupTaken, *group("ghost", 0, 0)[1:]),
        "without being taken",
    ),
    (
        "trained_groups_were_completed",
        lambda log: inserted(log, StepTrained, log[find(log, GroupCompleted)]),
        "completed twice",
    ),
    (
        "cut_groups_keep_their_tokens",
        lambda log: inserted(log, GroupCompleted, GroupResumed("g0a", 3)),
        "g0a was resumed without being cut",
    ),
    (
        "cut_groups_keep_their_tokens",
        lambda log: inserted(log, GroupCompleted, GroupCut("g0a", 4), GroupResumed("g0a", 3)),
        "resumed with 3 tokens",
    ),
    (
        "cut_groups_keep_their_tokens",
        lambda log: inserted(log, GroupCompleted, GroupCut("g0a", 4)),
        "complete while it was cut",
    ),
    (
        "requeued_prompts_begin_anew",
        lambda log: inserted(log, GroupDropped, GroupRequeued("g0x", "stale", "g0y")),
        "g0y was never taken",
    ),
    (
        "requeued_prompts_begin_anew",
        lambda log: inserted(log, GroupDropped, GroupRequeued("g0x", "stale", "g1a")),
        "g1a has prompt p-g1a, g0x had p",
    ),
    ("lengths_agree", lambda log: changed(log, GroupCompleted, lengths=[[3, 3, 2, 3], [1] * 4]), "member 0"),
    ("lengths_agree", lambda log: changed(log, GroupCompleted, lengths=[[3] * 4, [1] * 3]), "member 1"),
    ("lengths_agree", lambda log: changed(log, GroupCompleted, rewards=[1.0]), "2 members but 1 rewards"),
    (
        "steps_account_for_groups",
        lambda log: changed(log, StepTrained, groups=3),
        "7 groups by their own count",
    ),
    ("steps_account_for_groups", lambda log: without(log, StepTrained), "by their own count"),
    ("steps_account_for_groups", lambda log: changed(log, StepTrained, 1, step=0), "was trained 2 times"),
    (
        "engines_join_with_the_current_version",
        lambda log: inserted(log, GroupTaken, EngineReady("engine-2", "http://x", 1, label(0)), at=3),
        "engine-2 became ready with",
    ),
    (
        "engines_join_with_the_current_version",
        lambda log: changed(log, EngineReady, 1, version=label(0)),
        "current is None",
    ),
    ("tokens_are_of_committed_versions", lambda log: without(log, VersionCommitted), "completed with"),
    ("commits_are_attested", lambda log: without(log, VersionAttested, 1), "without the proof of engine-1"),
    ("commits_are_attested", lambda log: changed(log, VersionAttested, 1, root=root(9)), "proof of engine-1"),
    ("commits_are_attested", lambda log: changed(log, VersionAttested, level="label"), "proof of engine-0"),
    ("commits_are_attested", lambda log: [log[0], *log[3:]], "without any required engine"),
    (
        "tokens_are_of_committed_versions",
        lambda log: changed(log, GroupTrained, versions=[label(0), label(7)]),
        "trained with",
    ),
    (
        "tokens_are_of_committed_versions",
        lambda log: changed(log, GroupCompleted, 2, versions=[label(2)]),
        "completed with",
    ),
    (
        "frozen_models_stay",
        lambda log: inserted(inserted(log, RunEnded, frozen(1)), VersionCommitted, frozen(0)),
        f"engine judge-0 of the model judge held {root(0)}, then {root(1)}",
    ),
    (
        "frozen_models_stay",
        lambda log: inserted(inserted(log, StepTrained, frozen(0), at=2), VersionCommitted, frozen(0)),
        "judge-0 of the model judge did not attest again at the end",
    ),
    ("lag_is_bounded", lambda log: changed(log, GroupTrained, lag=1), "bound is 0"),
    ("lag_is_bounded", lambda log: changed(log, GroupTrained, lag=-1), "bound is 0"),
    ("lag_is_bounded", lambda log: changed(log, GroupTrained, 4, versions=[label(1)]), "make it 1"),
    (
        "steps_count_their_tokens_by_lag",
        lambda log: changed(log, StepTrained, lags=[[0, 15], [1, 1]]),
        "step 0 trained 1 tokens of lag 1, the bound is 0",
    ),
    (
        "steps_count_their_tokens_by_lag",
        lambda log: changed(log, StepTrained, 1, lags=[[0, 15]]),
        "step 1 trained 16 tokens, 15 of them are known by their lag",
    ),
    (
        "sync_trains_the_current_version",
        lambda log: changed(log, GroupTrained, 4, versions=[label(1)]),
        "current is",
    ),
    ("commits_are_attested", lambda log: without(log, VersionAttested, 2), "without the proof of engine-0"),
    (
        "commits_are_attested",
        lambda log: changed(log, VersionAttested, 2, root=root(9)),
        "without the proof of engine-0",
    ),
    (
        "commits_are_attested",
        lambda log: changed(log, VersionAttested, 3, level="label"),
        "proof of engine-1",
    ),
    ("commits_are_attested", lambda log: changed(log, VersionPublished, required=[]), "without any required"),
    ("commits_are_attested", lambda log: without(log, VersionPublished), "never published"),
    (
        "commits_are_attested",
        lambda log: fenced_on_the_way(changed(log, VersionPublished, at_least=2)),
        "was committed by 1 engines, 2 are needed",
    ),
    (
        "engines_activate_what_they_prepared",
        lambda log: without(log, VersionPrepared),
        "engine-0 attested v000001-",
    ),
    (
        "tentative_engines_are_fenced",
        lambda log: [
            VersionAborted(event.version, "x") if event == VersionCommitted(label(1)) else event
            for event in log
        ],
        "which was aborted, and was not fenced",
    ),
    (
        "commits_are_attested",  # the proof comes too late
        lambda log: inserted(without(log, VersionAttested, 3), RunEnded, log[find(log, VersionAttested, 3)]),
        "proof of engine-1",
    ),
    (
        "commits_are_attested",  # the proof is older than the version: of an abandoned one with its label
        lambda log: inserted(
            without(log, VersionAttested, 2), GroupTaken, log[find(log, VersionAttested, 2)]
        ),
        "proof of engine-0",
    ),
    ("counters_only_rise", lambda log: changed(log, VersionPublished, 1, counter=1), "counter 1 after 1"),
    ("counters_only_rise", lambda log: changed(log, VersionPublished, root=root(9)), "does not name"),
    (
        "counters_only_rise",
        lambda log: changed(log, VersionPublished, counter=0, version=f"v000000-{root(1)[:16]}"),
        "counter 0 after 0",
    ),
    (
        "versions_end_once",
        lambda log: inserted(log, RunEnded, VersionCommitted(label(1))),
        "committed, then committed",
    ),
    (
        "versions_end_once",
        lambda log: inserted(log, VersionCommitted, VersionAborted(label(1), "x"), at=1),
        "aborted, then committed",
    ),
    (
        "sync_commits_every_step",
        lambda log: without(log, VersionCommitted, 1),
        "before the version of step 0",
    ),
    (
        "sync_commits_every_step",
        lambda log: without(log, VersionCommitted, 3),
        "ended without the version of step 2",
    ),
    (
        "sync_commits_every_step",
        lambda log: inserted(log, RunEnded, VersionCommitted(label(9))),
        "without a train step",
    ),
    ("nothing_is_left_over", lambda log: changed(log, RunEnded, leftovers=["process 17"]), "process 17"),
]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_right_log_passes_every_rule(steps):
    report = audit(good(steps))
    assert report.failed == [] and report.ok
    assert report.passed == [rule.__name__ for rule in RULES]


@pytest.mark.parametrize(("rule", "plant", "said"), PLANTED)
def test_a_planted_violation_is_found_by_its_rule(rule, plant, said):
    report = audit(plant(good()))
    assert any(name == rule and said in detail for name, detail in report.failed), report.failed
    assert rule not in report.passed


def test_every_rule_has_a_planted_violation():
    assert {rule for rule, _, _ in PLANTED} == {rule.__name__ for rule in RULES}


def test_every_rule_names_its_invariant():
    for rule in RULES:
        assert rule.__doc__ and ("nvariant" in rule.__doc__ or rule.__name__.startswith("log_")), (
            rule.__name__
        )


def test_a_frozen_model_that_stayed_passes_and_is_told_in_the_summary():
    log = inserted(inserted(good(), RunEnded, frozen(0)), VersionCommitted, frozen(0))
    assert audit(log).ok
    told = {"root": root(0), "level": "memory", "attested": 2, "stayed": True}
    assert models_summary(log) == {"models": {"judge": {"judge-0": told}}}
    lost = inserted(good(), VersionCommitted, frozen(0))
    assert audit([*lost[:-1], EngineLost("judge-0", "rollout", "none", "killed"), lost[-1]]).ok


def test_an_engine_that_takes_no_updates_proves_no_commit():
    log = inserted(good(), EngineReady, EngineReady("judge-0", "http://x", 1, "none", updated=False))
    assert audit(log).ok


def test_a_run_without_engines_commits_what_it_publishes_for_none() -> None:
    """As fine-tuning on answers of the data; with an engine in it the same log is no right one."""
    kinds = (EngineReady, VersionPrepared, VersionAttested)
    log = [event for event in good() if not isinstance(event, kinds)]
    log = [replace(e, required=[], at_least=0) if isinstance(e, VersionPublished) else e for e in log]
    assert audit(log).ok, audit(log).failed
    for wrong in (changed(log, VersionPublished, at_least=1), without(log, VersionPublished)):
        assert "commits_are_attested" in dict(audit(wrong).failed)
    engine = EngineReady("engine-0", "http://x", 1, label(0))
    assert "commits_are_attested" in dict(audit(inserted(log, VersionCommitted, engine)).failed)


def test_a_run_that_died_has_open_groups_but_no_lost_ones():
    log = died(good())
    assert audit(log).ok
    counts = count_groups(log)
    assert (counts.taken, counts.open, counts.lost) == (3, 2, 0)
    ended = [*log, EngineLost("engine-0", "rollout", label(0), "killed"), RunEnded("failed", "engine-0", [])]
    assert audit(ended).ok and count_groups(ended).open == 2
    lost = [*log, RunEnded("ok", "", [])]
    assert audit(lost).failed_rules == ["each_group_ends_once"]
    assert count_groups(lost).lost == 2


def test_an_update_that_failed_is_no_violation_where_the_run_says_so():
    log = good(1)
    cut = find(log, VersionAttested, 2)
    told = [*log[:cut], VersionAborted(label(1), "engine-1 refused"), RunEnded("failed", "update", [])]
    assert audit(told).ok
    silent = [*log[:cut], VersionAborted(label(1), "engine-1 refused"), RunEnded("ok", "", [])]
    assert audit(silent).failed_rules == ["sync_commits_every_step"]


def test_counts_of_a_whole_run():
    counts = count_groups(good())
    assert (counts.taken, counts.trained, counts.dropped, counts.lost, counts.open) == (9, 6, 3, 0, 0)


def test_lag_is_allowed_up_to_the_bound_outside_sync():
    log = changed(good(), RunStarted, schedule="pipelined", max_lag=1)
    assert audit(changed(log, GroupTrained, 4, versions=[label(1)], lag=1)).ok
    assert audit(changed(log, GroupTrained, 4, versions=[label(0)], lag=2)).failed_rules == ["lag_is_bounded"]


def test_in_sync_only_what_goes_on_in_later_rollouts_is_older_than_the_current_version():
    older = changed(good(), GroupTrained, 4, versions=[label(1), label(2)], lag=1)
    assert "sync_trains_the_current_version" in audit(older).failed_rules
    assert audit(changed(older, RunStarted, max_lag=1)).ok  # partial rollouts


def test_many_violations_are_cut():
    log = [GroupDropped(f"g{i}", "x") for i in range(100)]
    report = audit(log)
    details = [detail for rule, detail in report.failed if rule == "each_group_ends_once"]
    assert len(details) == MAX_DETAILS + 1 and details[-1] == f"and {100 - MAX_DETAILS} more"


def test_an_empty_log_is_no_run():
    assert audit([]).failed_rules == ["log_opens_and_closes_once"]


def test_an_update_that_lost_an_engine_and_had_enough_is_right() -> None:
    assert audit(fenced_on_the_way(good())).failed == []


def resumed(behind: int = 2) -> list:
    """The run is killed in step 2 and goes on after `behind` steps, by a version of its own with the same weights;
    what it had trained beyond is stored and trained again."""
    log = good()[: find(good(), StepTrained, 2)]
    first = WeightVersion(2, 9, root(behind))
    again = [
        event for number in range(behind, 3) for event in step(number) if not isinstance(event, GROUP_BEGINS)
    ]
    renamed = {label(number): f"v{number + 9:06d}-{root(number)[:16]}" for number in range(behind + 1, 4)}
    return [
        *log,
        RunStarted("run", 2, 7, "sync", 0, resumed_at=behind),
        *(EngineReady(engine, "", 1, "none") for engine in ENGINES),
        *(VersionAttested(engine, label(0), root(0), "memory") for engine in ENGINES),
        VersionCommitted(label(0)),
        VersionPublished(first.label, 2, 9, first.root, behind, 1000, ENGINES),
        *(VersionPrepared(engine, first.label) for engine in ENGINES),
        *(VersionAttested(engine, first.label, first.root, "memory") for engine in ENGINES),
        VersionCommitted(first.label),
        *(_renamed(event, renamed) for event in again),
        RunEnded("finished", "", []),
    ]


def _renamed(event, labels: dict[str, str]):
    if isinstance(event, VersionPublished):
        return replace(event, version=labels[event.version], counter=event.counter + 9)
    return replace(event, version=labels[event.version]) if hasattr(event, "version") else event


GROUP_BEGINS = (GroupTaken, GroupCompleted, GroupDropped)


@pytest.mark.parametrize("behind", [1, 2])
def test_a_run_that_was_resumed_is_audited_as_one(behind: int) -> None:
    log = resumed(behind)
    assert audit(log).failed == []
    assert vars(count_groups(log)) == {
        "taken": 9,
        "trained": 6,
        "dropped": 3,
        "open": 0,
        "lost": 0,
        "requeued": 0,
    }
    killed = log[: find(log, RunStarted, 1) + 5]
    assert audit(killed).failed == [] and count_groups(killed).lost == 0


def test_a_group_that_was_trained_before_the_resume_and_again_after_it_is_found() -> None:
    log = inserted(resumed(), StepTrained, GroupTrained("g0a", 2, [label(2)], 0), at=2)
    assert ("each_group_ends_once", "group g0a ended 2 times: trained, trained") in audit(log).failed
    anew = [GroupTaken("g0a", "p", 2), GroupCompleted("g0a", [[1] * 4], [label(2)], [1.0])]
    log = inserted(resumed(), StepTrained, *anew, GroupTrained("g0a", 2, [label(2)], 0), at=2)
    assert ("each_group_ends_once", "group g0a was taken twice") in audit(log).failed


def test_a_group_that_a_resume_forgot_is_found() -> None:
    log = resumed()
    log = without(log, GroupTrained, len([e for e in log if isinstance(e, GroupTrained)]) - 1)
    assert any(rule == "each_group_ends_once" and "lost" in detail for rule, detail in audit(log).failed)


def test_tokens_of_an_undone_version_need_the_same_weights_made_again() -> None:
    log = resumed(1)
    other = "f" * 32
    again = WeightVersion(2, 11, other)
    log = [
        replace(event, version=again.label, **({"root": other} if hasattr(event, "root") else {}))
        if getattr(event, "version", "").startswith("v000011-")
        else event
        for event in log
    ]
    assert any(rule == "sync_trains_the_current_version" for rule, _ in audit(log).failed)


def test_groups_that_were_cut_requeued_and_left_in_flight_are_right_when_they_go_on() -> None:
    log = inserted(good(), GroupCompleted, GroupCut("g0a", 4), GroupResumed("g0a", 4))
    requeued = [GroupTaken("g0r", "p", 0), GroupRequeued("g0r", "stale", "g0s"), GroupTaken("g0s", "p", 0)]
    log = inserted(log, GroupDropped, *requeued, GroupDropped("g0s", "surplus"))
    assert audit(log).ok
    again = RunStarted("run", 2, 7, "sync", 0, resumed_at=0)
    log = inserted(log, GroupCompleted, again, GroupResumed("g0b", 7), at=1)
    assert "cut_groups_keep_their_tokens" in audit(log).passed


@pytest.mark.parametrize("also", [False, True])
def test_the_base_is_required_of_the_engines_of_its_incarnation(also):
    """One that was added by a command is not remembered by the next incarnation, and never held the base."""
    label, root = "v000000-" + "0" * 16, "0" * 32
    proved = VersionAttested("e0", label, root, "memory")
    begins = [EngineReady("e0", "", 1, "none"), proved, VersionCommitted(label)]
    started = [RunStarted("run", incarnation, 1, "async", 2) for incarnation in (0, 1)]
    late = EngineReady("late", "", None, "none")
    log = [started[0], *begins, late, started[1], *([late] if also else []), *begins]
    assert [why.rpartition(" ")[2] for why in commits_are_attested(log)] == (["late"] if also else [])
