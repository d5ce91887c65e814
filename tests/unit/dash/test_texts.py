"""Texts of tokens and prompts, and the reasons where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from turnout.dash.texts import Texts


def test_a_character_of_several_tokens_stands_at_its_last(tmp_path: Path) -> None:
    texts = Texts({}, lambda _: None)
    texts._tried = True
    texts._decode = lambda ids: bytes(ids).decode(errors="replace")
    assert texts.pieces(list("aé☃b".encode())) == ["a", "", "é", "", "", "☃", "b"]
    assert texts.pieces([0xE2, 0x98]) == ["", "\ufffd"]
    assert texts.pieces([*[0xFF] * 8, 0x61])[-1] == "a"


def test_blanks_that_a_tokenizer_drops_at_the_beginning_of_a_text_stay_between_its_tokens() -> None:
    words = ["▁the", "▁c", "at", "▁", "▁sat"]
    texts = Texts({}, lambda _: None)
    texts._tried = True
    texts._decode = lambda ids: "".join(words[one] for one in ids).replace("▁", " ").removeprefix(" ")
    assert texts.pieces([0, 1, 2, 3, 4]) == [" the", " c", "at", " ", " sat"]
    assert texts.pieces([4, 4], before=[2, 3]) == [" sat", " sat"]


def test_why_there_is_no_tokenizer(tmp_path: Path) -> None:
    texts = Texts({"hf_checkpoint": "no/model"}, lambda _: None)
    assert texts.pieces([1]) is None and "tokenizer.json of no/model" in texts.missing
    (tmp_path / "tokenizer.json").write_text("{")
    broken = Texts({"hf_checkpoint": "m"}, lambda _: tmp_path)
    assert broken.pieces([1]) is None and "can't be read" in broken.missing


def test_a_prompt_is_its_row(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2"}]
    data.write_text("\n".join(json.dumps({"prompt": one, "label": "3"}) for one in ("first", turns)))
    config = {"prompt_data": f"{data}@[1:2]", "input_key": "prompt", "label_key": "label"}
    texts = Texts(config, lambda _: None)
    assert texts.prompt("0") == ("first\n\n[label] 3", "")
    assert texts.prompt("1") == ("[system] Add.\n[user] 1 + 2\n\n[label] 3", "")
    assert texts.prompt("7")[1].endswith("has no row 7 that can be read") and texts.prompt("x")[1]
    assert "is not here" in Texts({"prompt_data": "gone.jsonl"}, lambda _: None).prompt("0")[1]
    reasons = {
        "reasoning_gym:x": "made",
        "verifiers:x": "environment of verifiers",
        "hub:me/x": "no data set of the hub",
    }
    for name, reason in reasons.items():
        assert reason in Texts({"prompt_data": name}, lambda _: None).prompt("0")[1]


def test_a_prompt_of_a_saved_data_set(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["first", "second"]})
    with pa.ipc.new_stream(str(tmp_path / "data.arrow"), table.schema) as file:
        file.write_table(table)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    texts = Texts({"prompt_data": str(tmp_path), "input_key": "prompt"}, lambda _: None)
    assert texts.prompt("1") == ("second", "")
    (tmp_path / "state.json").unlink()
    assert "no state.json" in texts.prompt("0")[1]
