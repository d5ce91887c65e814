"""Who waits for whom: the chain to the root, by tables."""

from __future__ import annotations

import pytest

from turnout.core.waits import ENGINES, PLACES, Chain, Wait, Waits, root_cause


def edges(text):
    """Waits as `who>on:since`, with spaces between them; ENGINES and PLACES are written so."""
    names = {"ENGINES": ENGINES, "PLACES": PLACES}
    found = []
    for one in text.split():
        who, on, since = one.replace(":", ">").split(">")
        found.append(Wait(names.get(who, who), names.get(on, on), "it", float(since)))
    return found


@pytest.mark.parametrize(
    "text, key",
    [
        ("", ""),
        ("run>train:5", "train"),
        ("run>train:5 train>trainer:6", "train trainer"),
        ("a>x:1", ""),  # nobody waits for the group
        ("update>prepare:5 prepare>x:6", "prepare x"),  # the run waits for nothing else
        ("run>train:5 update>prepare:1", "train"),  # what goes on beside holds nobody up
        # all groups are waited for: what moved longest ago is the root
        ("run>rollout:0 rollout>a:0 rollout>b:0 a>x:9 a>y:4 b>reward:6", "rollout a y"),
        # the first place that is free is enough: the request that moved last is in the way
        ("run>rollout:0 rollout>a:0 a>PLACES:1 PLACES>x:2 PLACES>y:7", "rollout a PLACES y"),
        ("run>evaluate:0 evaluate>ENGINES:1 ENGINES>x:2 ENGINES>y:3", "evaluate ENGINES y"),
        # slots wait for a commit, that for an engine
        ("run>rollout:0 rollout>update:1 update>activate:2 activate>x:3", "rollout update activate x"),
    ],
)
def test_the_chain_ends_at_the_root(text, key):
    chain = root_cause(edges(text))
    found = " ".join({ENGINES: "ENGINES", PLACES: "PLACES"}.get(name, name) for name in chain.key)
    assert found == key and not chain.circle


def test_a_circle_is_told_and_ends():
    ring = "run>rollout:0 rollout>update:1 update>drain:2 drain>rollout:3"
    chain = root_cause(edges(ring))
    assert chain.circle and chain.key == ("rollout", "update", "drain", "rollout")
    assert "a circle" in chain.line(10)
    beside = root_cause(edges(f"{ring} drain>a:0 a>x:1"))
    assert beside.key[-1] == "x" and not beside.circle, (
        "what moved longest ago, though there is a circle as well"
    )


def test_the_line_says_how_long_and_at_most_and_what_is_known_besides():
    waits = [Wait("run", "rollout", "its end", 10), Wait("rollout", "reward f", "its score", 12.0, 52.0)]
    line = root_cause(waits).line(43.4, {"reward f": "it hangs"})
    assert line == "run -> rollout -> reward f: its score, for 31 s of at most 40 s (it hangs)"
    assert Chain().line(5) == "nothing is waited for"
    assert root_cause(waits).to_json(43)[1]["limit_s"] == 40.0


def test_a_wait_is_open_while_its_block_runs_and_moves_with_it():
    now = [1.0]
    waits = Waits(lambda: now[0])
    with waits("a", "b", "c", 5.0) as outer, waits.of("a")("b", "c", 1.0):
        assert [(w.who, w.since, w.until) for w in waits.open] == [("a", 1.0, 6.0), ("a", 1.0, 2.0)]
        now[0] = outer.since = 3.0
        assert root_cause(waits.open, ("a",)).since == 1.0
    with pytest.raises(ValueError), waits("a", "b", "c"):
        raise ValueError
    assert waits.open == []
