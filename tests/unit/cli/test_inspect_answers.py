"""`turnout inspect` about a token, a version and an engine; JSON, files, and names that are nearly right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.inspected import inspected, told, write_events
from tests.unit.rollout.ledger_parts import LABELS
from turnout.cli.main import main
from turnout.core.events import EngineReady, RunStarted, to_json
from turnout.observe.metrics import REWARD, MetricsLog
from turnout.rollout.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    write_events(tmp_path)
    return inspected(tmp_path)


def asked(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    return json.loads(told(capsys, *words, "--json"))


def test_a_token_tells_who_made_it_and_what_became_of_it(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = told(capsys, tmp_path, "--token", "g00000000.1:1:4")
    assert out == (
        "token 4 of 5, member 1 of group g00000000.1\n"
        "  id         1004\n"
        "  log-prob   -2.666667 as sampled\n"
        "  mask       0: carries no loss (made on KV of older weights too)\n"
        f"  version    {LABELS[1]} (committed, of 1 train steps, lag -1)\n"
        "  engine     engine-1\n"
        "  response   reward 0.142857, finish stop\n"
        "  group      trained by step 0\n"
    )
    assert told(capsys, tmp_path, "--group", "0", "--member", 1, "--token", 4) == out, "of the last attempt"
    assert "mask       1: may train\n" in told(capsys, tmp_path, "--token", "g00000000.1:1:3")


def test_a_token_that_is_forgotten_still_has_its_maker(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = asked(capsys, tmp_path, "--token", "g00000000.1:0:2")
    assert (before["token_id"], before["version"], before["engine"]) == (2, LABELS[0], "engine-0")
    ledger.forget(["g00000000.1"])
    after = asked(capsys, tmp_path, "--token", "g00000000.1:0:2")
    gone = {"token_id", "logprob", "mask", "kv_mixed"}
    assert after == {key: value for key, value in before.items() if key not in gone} | {"stored": False}
    assert "are forgotten" in told(capsys, tmp_path, "--token", "g00000000.1:0:2")


def test_a_stale_token_that_was_masked_in_its_step_says_so(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"staleness_policy": "mask", "max_staleness": -1}  # a lag of 0 is over it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert asked(capsys, tmp_path, "--token", "g00000000.1:1:1")["masked_as_stale"]
    assert "its step has taken it out of the loss" in told(capsys, tmp_path, "--token", "g00000000.1:1:1")
    assert not asked(capsys, tmp_path, "--token", "g00000000.1:1:3")["masked_as_stale"], "its lag is -1"


def test_a_text_of_a_token_is_that_of_its_tokenizer(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, decoders, models

    words = {word: number for number, word in enumerate(["zero", "one", "two", "three", "four"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="zero"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"hf_checkpoint": str(tmp_path)}))
    found = asked(capsys, tmp_path, "--token", "g00000000.1:0:1")
    assert [found[key].strip() for key in ("before", "text", "after")] == ["zero", "one", "twothree"]


def test_a_version_tells_its_way_and_what_it_made(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = told(capsys, tmp_path, "--version", 2)
    assert out == (
        f"version {LABELS[1]}: committed, counter 2, incarnation 0\n"
        f"  root       {LABELS[1].split('-')[1]}{'0' * 16}\n"
        "  made by    step 0 of 1 groups, after 1 train steps\n"
        "  published  TIME, 4000 bytes, packed, 3 % of elements\n"
        "  publish    0.500 s\n"
        "  prepare    0.500 s\n"
        "  activate   0.250 s\n"
        "  engine     engine-0: prepared TIME, attested TIME (memory)\n"
        "  committed  TIME\n"
        "  generated  5 tokens in 2 groups: 3 trained, 2 partial\n"
        "    lag -1: 3 tokens of trained groups\n"
    )
    assert told(capsys, tmp_path, "--version", LABELS[1]) == out
    first = asked(capsys, tmp_path, "--version", "v1")
    assert (first["made_from"], first["phases"], first["tokens"]) == ([], [], 9)
    assert [one["engine"] for one in first["engines"]] == ["engine-0"]


def test_an_engine_tells_its_lives_and_its_work(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, tmp_path, "--engine", "engine-1") == (
        "engine engine-1: 2 lives, 1 lost, 1 restarts\n"
        "  TIME  ready at http://127.0.0.1:2, process 12\n"
        f"  TIME  fenced by {LABELS[1]}: no answer\n"
        "  TIME  lost in rollout: its process ended\n"
        "  TIME  ready at http://127.0.0.1:3, process 13\n"
        "  TIME  left: the run ended\n"
        "  fenced     0.500 s\n"
        "  idle       6.000 s\n"
        "  tokens     5 by 1 versions\n"
    )
    other = asked(capsys, tmp_path, "--engine", "engine-0")
    assert (other["requests"], other["seconds"]["rollout"], other["losses"]) == (5, 2.0, 0)
    assert [one["version"] for one in other["versions"]] == list(LABELS)
    assert other["tokens_by_version"] == {LABELS[0]: 9}
    ledger.forget(["g00000000.1"])
    assert asked(capsys, tmp_path, "--engine", "engine-0") == other


def test_a_life_that_another_incarnation_cut_is_no_loss(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "events.jsonl").open("a") as file:
        for at, event in (
            (10.0, RunStarted("the-run", 1, 1, "async", 1, resumed_at=1)),
            (11.0, EngineReady("engine-1", "http://127.0.0.1:4", 14, "none")),
            (12.0, RunStarted("the-run", 2, 1, "async", 1, resumed_at=1)),
            (13.0, EngineReady("engine-1", "http://127.0.0.1:5", 15, "none")),
        ):
            file.write(json.dumps(to_json(event, 1_700_000_000 + at)) + "\n")
    found = asked(capsys, tmp_path, "--engine", "engine-1")
    assert [life["end"] for life in found["lives"]] == ["lost", "left", "left", None]
    assert (found["losses"], found["restarts"]) == (1, 1)
    assert "left: incarnation 2 of the run began" in told(capsys, tmp_path, "--engine", "engine-1")


@pytest.mark.parametrize("words", [[], ["--group", "0"], ["--step", "0"], ["--why-dropped"], ["--check"]])
def test_every_answer_is_to_be_had_as_json(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert asked(capsys, tmp_path, *words)


def test_a_check_that_fails_fails_as_json_too(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger._connection.execute("DELETE FROM groups WHERE ordinal = 1")
    assert main(["inspect", str(tmp_path), "--check", "--json"]) == 70
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--group", "g00000009.0"], "the nearest is g00000003.0"),
        (["--group", "0.7"], "the nearest is g00000000.1"),
        (["--token", "g00000000.1:5:0"], "members 0 to 1 have tokens"),
        (["--token", "g00000000.1:0:4"], "member 0 of g00000000.1 has 4 tokens -> give 0 to 3"),
        (["--token", "g00000001.0:0:0"], "none of its members has tokens"),
        (["--token", "17"], "give --token GROUP:MEMBER:TOKEN"),
        (["--member", "1"], "give --token GROUP:MEMBER:TOKEN"),
        (["--version", "v000002-00000000000000bc"], f"did you mean {LABELS[1]}?"),
        (["--version", "7"], "did you mean"),
        (["--engine", "engine-7"], "did you mean engine-"),
    ],
)
def test_a_name_that_is_not_there_gets_the_nearest_one(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert main(["inspect", str(tmp_path), *words]) == 2
    assert why in capsys.readouterr().err


def test_the_timeline_is_written_where_it_is_wanted(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, tmp_path, "--trace") == f"{tmp_path / 'trace.json'}\n"
    assert told(capsys, tmp_path, "--trace", tmp_path / "x.json") == f"{tmp_path / 'x.json'}\n"
    assert json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert (tmp_path / "x.json").read_bytes() == (tmp_path / "trace.json").read_bytes()


def test_plots_of_a_run(ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path), "--plot"]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write(1, {REWARD: 0.5})
    assert asked(capsys, tmp_path, "--plot")["files"] == [
        str(tmp_path / "plots" / name) for name in ("plots.png", "reward.png")
    ]


def test_without_events_the_ledger_still_answers(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events.jsonl").unlink()
    assert "run the-run" in told(capsys, tmp_path)
    assert main(["inspect", str(tmp_path), "--engine", "engine-0"]) == 2
    assert "events.jsonl" in capsys.readouterr().err
