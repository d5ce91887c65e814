"""Labels of versions, and spans against a plain list of labels."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.core.version import VersionConstraint, VersionSpans, WeightVersion, label_counter

ROOT = "0123456789abcdef" * 2
PIECES = st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc")), max_size=12)


def built(pieces: list[tuple[int, str]]) -> tuple[VersionSpans, list[str]]:
    spans, labels = VersionSpans(), []
    for tokens, label in pieces:
        spans = spans.extended(tokens, label)
        labels += [label] * tokens
    return spans, labels


def flat(spans: VersionSpans) -> list[str]:
    return [label for tokens, label in spans.runs for _ in range(tokens)]


def test_the_label_names_counter_and_content() -> None:
    version = WeightVersion(2, 123, ROOT)
    assert version.label == "v000123-0123456789abcdef"
    assert version.directory == "weight_v000123"
    assert label_counter(version.label) == 123


def test_the_label_of_a_counter_above_six_digits_is_read_back() -> None:
    version = WeightVersion(0, 12_345_678, ROOT)
    assert (version.label, version.directory) == ("v12345678-0123456789abcdef", "weight_v12345678")
    assert label_counter(version.label) == 12_345_678


@pytest.mark.parametrize(
    "text",
    ["", "default", "3", "v123-0123456789abcdef", "v000123", "v000123-0123456789ABCDEF", "v000123-0123",
     "v000123-0123456789abcdef0", " v000123-0123456789abcdef", "v000123-0123456789abcdef\n"],
)  # fmt: skip
def test_foreign_labels_have_no_counter(text: str) -> None:
    assert label_counter(text) is None


def test_versions_are_ordered_by_incarnation_then_counter() -> None:
    assert sorted([WeightVersion(1, 0, "a"), WeightVersion(0, 9, "b"), WeightVersion(0, 10, "a")]) == [
        WeightVersion(0, 9, "b"), WeightVersion(0, 10, "a"), WeightVersion(1, 0, "a"),
    ]  # fmt: skip


@given(PIECES)
def test_extended_spans_are_the_list_of_labels_run_length_coded(pieces: list[tuple[int, str]]) -> None:
    spans, labels = built(pieces)
    assert flat(spans) == labels
    assert len(spans) == len(labels)
    assert spans.runs == tuple((len(list(group)), label) for label, group in groupby(labels))
    assert spans.labels == tuple(dict.fromkeys(labels))


@given(PIECES, PIECES)
def test_joined_spans_are_the_joined_lists(first: list[tuple[int, str]], then: list[tuple[int, str]]) -> None:
    joined = built(first)[0].joined(built(then)[0])
    assert flat(joined) == built(first)[1] + built(then)[1]
    assert isinstance(joined, VersionSpans)


@given(PIECES, st.integers(0, 60))
def test_cut_keeps_the_first_tokens(pieces: list[tuple[int, str]], tokens: int) -> None:
    spans, labels = built(pieces)
    assert flat(spans.cut(tokens)) == labels[:tokens]


@given(PIECES, PIECES)
def test_a_resume_after_a_cut_is_a_list_again(
    before: list[tuple[int, str]], after: list[tuple[int, str]]
) -> None:
    spans, labels = built(before)
    kept = len(labels) // 2
    spans, labels = spans.cut(kept), labels[:kept]
    for tokens, label in after:
        spans, labels = spans.extended(tokens, label), labels + [label] * tokens
    assert flat(spans) == labels


@pytest.mark.parametrize("runs", [((0, "a"),), ((-1, "a"),), ((1, "a"), (2, "a")), ((1, "a"), (0, "b"))])
def test_spans_that_are_not_normal_are_refused(runs: tuple[tuple[int, str], ...]) -> None:
    with pytest.raises(ValueError, match="not normal"):
        VersionSpans(runs)


A, B = "a" * 16, "b" * 16


@pytest.mark.parametrize(
    ("extra_key", "served", "met"),
    [
        (f"v000005-{A}", f"v000005-{A}", True),
        (f"v000005-{A}", f"v000006-{B}", True),
        (f"v000005-{A}", f"v000004-{A}", False),
        (f"v000005-{A}", f"v000005-{B}", False),
        (f"v000005-{A}", "default", False),
        (f"v000005-{A}!", f"v000005-{A}", True),
        (f"v000005-{A}!", f"v000006-{A}", False),
        (f"v000005-{A}!", f"v000005-{B}", False),
        (f"v999999-{A}", f"v1000000-{B}", True),
    ],
)
def test_a_constraint_is_a_minimum_or_exact(extra_key: str, served: str, met: bool) -> None:
    constraint = VersionConstraint.parse(extra_key)
    assert constraint is not None and constraint.met_by(served) is met


@pytest.mark.parametrize(
    "text", ["", "!", "session-7", "v5", f"v000005-{A}!!", f"xv000005-{A}", f"v000005-{A} "]
)
def test_any_other_extra_key_is_no_constraint(text: str) -> None:
    assert VersionConstraint.parse(text) is None
