"""Prompt files: every oddity of the public reports, lengths in tokens, limits, fingerprints."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.core.errors import DataError, ModelError
from turnout.rollout.prompts import DataSpec, fingerprint, load_prompts
from turnout.rollout.rows import read_rows
from turnout.rollout.tokenizer import HubTokenizer, load_tokenizer
from turnout.train.model_tokenizer import BOS_ID, byte_tokenizer, save_tokenizer


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> HubTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(byte_tokenizer(), folder)
    return load_tokenizer(folder)


def put(tmp_path: Path, name: str, *parts: str | bytes | dict[str, Any]) -> str:
    """A file of these pieces; objects become lines."""
    lines = [
        p if isinstance(p, bytes) else (p if isinstance(p, str) else json.dumps(p) + "\n").encode()
        for p in parts
    ]
    path = tmp_path / name
    path.write_bytes(b"".join(lines))
    return str(path)


def spec(path: str, **changes: Any) -> DataSpec:
    return DataSpec(**{"path": path, "input_key": "prompt", "label_key": "label", **changes})


def chat(path: str, **changes: Any) -> DataSpec:
    return spec(path, **{"label_key": None, "apply_chat_template": True, **changes})


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def faults(one: DataSpec, tok: HubTokenizer) -> list[str]:
    with pytest.raises(DataError) as caught:
        load_prompts(one, tok)
    str(caught.value).encode()  # an error that cannot be printed would hide itself
    return [fault.line() for fault in caught.value.faults]


# --- the ready-made inputs, by name ---


def test_dat_11_bom_jsonl(tmp_path: Path, tok: HubTokenizer) -> None:
    path = put(tmp_path, "bom.jsonl", b"\xef\xbb\xbf", {"prompt": "a", "label": "1"})
    [prompt] = load_prompts(spec(path), tok)
    assert (prompt.text, prompt.label, prompt.token_ids) == ("a", "1", (ord("a"),))


def test_crlf_jsonl(tmp_path: Path, tok: HubTokenizer) -> None:
    path = put(tmp_path, "crlf.jsonl", '{"prompt":"a","label":"1"}\r\n{"prompt":"b","label":"2"}')
    assert [(p.text, p.label) for p in load_prompts(spec(path), tok)] == [("a", "1"), ("b", "2")]


def test_dat_10_seps_jsonl(tmp_path: Path, tok: HubTokenizer) -> None:
    text = "a\u2028b\u2029\u0085c\x7f\x0b\x0c\x1c\x1e"
    path = put(tmp_path, "seps.jsonl", json.dumps({"prompt": text, "label": "x"}, ensure_ascii=False) + "\n")
    [prompt] = load_prompts(spec(path), tok)
    assert prompt.text == text
    assert tok.decode(prompt.token_ids) == text


def test_dat_11_blank_jsonl(tmp_path: Path, tok: HubTokenizer) -> None:
    path = put(tmp_path, "blank.jsonl", "\n", {"prompt": "a", "label": "1"}, "\n   \n")
    assert [p.prompt_id for p in load_prompts(spec(path), tok)] == ["0"]


def test_dat_11_broken_jsonl(tmp_path: Path, tok: HubTokenizer) -> None:
    good = {"prompt": "a", "label": "1"}
    path = put(tmp_path, "broken.jsonl", good, good, good, '{"prompt": "a", "label":')
    [line] = faults(spec(path), tok)
    assert line.startswith(f'{path}:4 = {{"prompt": "a", "label":: is not JSON')


def test_dat_08_types_jsonl(tmp_path: Path, tok: HubTokenizer) -> None:
    labels = ["007", 7, 7.0, "1e5", ["a", "b"], None, True]
    path = put(tmp_path, "types.jsonl", *({"prompt": "a", "label": label} for label in labels))
    loaded = [p.label for p in load_prompts(spec(path), tok)]
    assert loaded == labels
    assert [type(x) for x in loaded] == [type(x) for x in labels]


def test_dat_14_nolabel_jsonl(tmp_path: Path, tok: HubTokenizer) -> None:
    rows = ({"prompt": "a"}, {"label": "1"}, {"prompt": None, "label": "1"}, {"prompt": "", "label": "1"})
    path = put(tmp_path, "nolabel.jsonl", *rows)
    lines = faults(spec(path), tok)
    assert [line.split(" = ")[0] for line in lines] == [f"{path}:{n}" for n in (1, 2, 3, 4)]
    for line, reason in zip(lines, ("no label", "no prompt", "null", "is empty")):
        assert reason in line
    assert [line.split(" = ")[0] for line in faults(spec(path, label_key=None), tok)] == [
        f"{path}:{n}" for n in (2, 3, 4)
    ]


def test_chat_jsonl(tmp_path: Path, tok: HubTokenizer) -> None:
    rows = [
        user("q"),
        user([{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]),
        [{"role": "system", "content": "s"}],
        [*user("q"), {"role": "assistant", "content": "It is"}],
        "q",
    ]
    path = put(tmp_path, "chat.jsonl", *({"prompt": row} for row in rows))
    loaded = load_prompts(chat(path), tok)
    assert [p.text for p in loaded] == [
        "<|bos|>user: q\nassistant: ",
        "<|bos|>user: qr\nassistant: ",
        "<|bos|>system: s\nassistant: ",
        "<|bos|>user: q\nassistant: It is",
        "<|bos|>user: q\nassistant: ",
    ]
    assert all(p.token_ids.count(BOS_ID) == 1 and p.token_ids[0] == BOS_ID for p in loaded)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def tool_talk(arguments: Any) -> list[dict[str, Any]]:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name in ("f", "g")]
    return [
        *user("q"),
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "A!"},
        {"role": "tool", "content": "B!"},
        {"role": "assistant", "content": "done"},
        *user("again"),
    ]


def test_dat_07_tools_jsonl(tmp_path: Path, tok: HubTokenizer) -> None:
    talks = [tool_talk({"x": 1}), tool_talk('{"x": 1}')]
    given_tools: list[Any] = [[TOOL], json.dumps([TOOL]), None]
    rows = ({"prompt": talk, "tools": tools} for talk in talks for tools in given_tools)
    path = put(tmp_path, "tools.jsonl", *rows)
    loaded = load_prompts(chat(path, tool_key="tools"), tok)
    assert len({p.text for p in loaded[::3] + loaded[1::3]}) == 1  # both spellings render alike
    assert loaded[2].text == loaded[5].text
    for prompt in loaded:
        assert prompt.text.count("tool: A!\ntool: B!\n") == 1
    assert loaded[0].text.startswith("<|bos|>tools: [")
    assert not loaded[2].text.startswith("<|bos|>tools")


def test_dat_04_mm_jsonl(tmp_path: Path, tok: HubTokenizer) -> None:
    rows = [
        {"prompt": "<image> a", "images": ["1.png"]},
        {"prompt": "<image> a", "images": None},
        {"prompt": "<image> a"},
        {"prompt": "<image> a", "images": []},
        {"prompt": "<image> <image> a", "images": ["1.png"]},
        {"prompt": "a", "images": ["1.png"]},
        {"prompt": user([{"type": "image"}, {"type": "text", "text": "a"}])},
        {"prompt": "a", "images": []},
    ]
    path = put(tmp_path, "mm.jsonl", *rows)
    lines = faults(chat(path), tok)
    assert [line.split(" = ")[0] for line in lines] == [f"{path}:{n}" for n in range(1, 8)]
    assert "column 'images'" in lines[0]
    assert "<image>" in lines[1]
    assert "'image'" in lines[6]
    assert [p.prompt_id for p in load_prompts(chat(f"{path}@[7:]"), tok)] == ["7"]


def test_long_jsonl(tmp_path: Path, tok: HubTokenizer, caplog: pytest.LogCaptureFixture) -> None:
    tool = {"type": "function", "function": {"name": "f" * 300, "parameters": {}}}
    rows = [
        {"prompt": "x" * 1_000_000},
        {"prompt": "😀" * 40},
        {"prompt": "a", "tools": [tool]},
        {"prompt": "a" * 40},
    ]
    path = put(tmp_path, "long.jsonl", *rows)
    with caplog.at_level(logging.WARNING):
        loaded = load_prompts(chat(path, tool_key="tools", max_prompt_tokens=100), tok)
    assert [p.prompt_id for p in loaded] == ["3"]
    assert "3 of 4 rows have more than 100 tokens and are dropped" in caplog.text
    lines = faults(chat(path, tool_key="tools", max_prompt_tokens=100, too_long="error"), tok)
    assert [line.split(" = ")[0] for line in lines] == [f"{path}:{n}" for n in (1, 2, 3)]
    assert max(map(len, lines)) < 400


def test_dup_jsonl(tmp_path: Path, tok: HubTokenizer) -> None:
    same = {"prompt": "a", "label": "1", "metadata": {"id": "mine"}}
    path = put(tmp_path, "dup.jsonl", same, same, same, {**same, "prompt": "b"})
    loaded = load_prompts(spec(path, metadata_key="metadata"), tok)
    assert [p.prompt_id for p in loaded] == ["0", "1", "2", "3"]
    assert all(p.metadata == {"id": "mine"} for p in loaded)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_empty_jsonl(tmp_path: Path, tok: HubTokenizer, content: bytes) -> None:
    path = put(tmp_path, "empty.jsonl", content)
    [line] = faults(spec(path), tok)
    assert "holds no row" in line


def test_dat_04_empty_jsonl_all_rows_filtered_out(tmp_path: Path, tok: HubTokenizer) -> None:
    path = put(tmp_path, "filtered.jsonl", {"prompt": "abc", "label": 1}, {"prompt": "abcde", "label": 1})
    [line] = faults(spec(path, max_prompt_tokens=2), tok)
    assert "all 2 rows have more than 2 tokens; the shortest has 3" in line


def test_badutf8_jsonl(tmp_path: Path, tok: HubTokenizer) -> None:
    good = {"prompt": "a", "label": "1"}
    path = put(tmp_path, "badutf8.jsonl", good, b'{"prompt":"x\xff\xfe","label":"1"}\n', good)
    [line] = faults(spec(path), tok)
    assert line.startswith(f"{path}:2 = ")
    assert "byte 13 of the line is not UTF-8" in line


@pytest.mark.parametrize(
    "row",
    [
        r'{"prompt":"\ud83d","label":"x"}',
        r'{"prompt":"a","label":"\uDE00"}',
        r'{"prompt":"a","label":"x","metadata":{"k":["\uD83D "]}}',
    ],
)
def test_surrogate_jsonl_is_refused_so_that_no_dump_can_fail(
    tmp_path: Path, tok: HubTokenizer, row: str
) -> None:
    path = put(tmp_path, "surrogate.jsonl", row + "\n")
    [line] = faults(spec(path), tok)
    assert f"{path}:1" in line
    assert "half of a surrogate pair" in line


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path, tok: HubTokenizer) -> None:
    path = put(tmp_path, "pair.jsonl", r'{"prompt":"\ud83d\ude00","label":"x"}')
    assert load_prompts(spec(path), tok)[0].text == "😀"


# --- reports ---


def test_dat_01_lengths_are_tokens_not_characters(tmp_path: Path, tok: HubTokenizer) -> None:
    path = put(tmp_path, "a.jsonl", {"prompt": "x" * 16, "label": 0}, {"prompt": "😀" * 9, "label": 0})
    assert [p.prompt_id for p in load_prompts(spec(path, max_prompt_tokens=16), tok)] == ["0"]


def test_dat_02_text_messages_and_ids_are_measured_alike(tmp_path: Path, tok: HubTokenizer) -> None:
    path = put(tmp_path, "a.jsonl", {"prompt": "hi"}, {"prompt": user("x" * 5000)}, {"prompt": [1, 2, 3]})
    loaded = load_prompts(chat(path, max_prompt_tokens=100), tok)
    assert [p.prompt_id for p in loaded] == ["0", "2"]
    assert loaded[1].token_ids == (1, 2, 3)


def test_dat_05_order_is_kept(tmp_path: Path, tok: HubTokenizer) -> None:
    rows = ({"prompt": user("u") if i % 2 else "t"} for i in range(9))
    path = put(tmp_path, "a.jsonl", *rows)
    assert [p.prompt_id for p in load_prompts(chat(path, max_prompt_tokens=50), tok)] == [
        str(i) for i in range(9)
    ]


def test_dat_14_metadata_is_an_object_or_json_text_and_may_be_absent(
    tmp_path: Path, tok: HubTokenizer
) -> None:
    given = [{"k": 1}, '{"k": 1}', None, "[1]", 3, "{"]
    rows = [{"prompt": "a", "label": 0, "metadata": value} for value in given] + [{"prompt": "a", "label": 0}]
    path = put(tmp_path, "a.jsonl", *rows)
    lines = faults(spec(path, metadata_key="metadata"), tok)
    assert [line.split(" = ")[0] for line in lines] == [f"{path}:{n}" for n in (4, 5, 6)]
    good = put(tmp_path, "b.jsonl", *rows[:3], rows[-1])
    loaded = load_prompts(spec(good, metadata_key="metadata"), tok)
    assert [p.metadata for p in loaded] == [{"k": 1}, {"k": 1}, {}, {}]


def test_cfg_14_no_limit_drops_nothing(tmp_path: Path, tok: HubTokenizer) -> None:
    path = put(tmp_path, "a.jsonl", {"prompt": "x" * 20_000, "label": 0})
    assert len(load_prompts(spec(path), tok)[0].token_ids) == 20_000


def test_ckp_11_a_fingerprint_tells_what_changed(tmp_path: Path, tok: HubTokenizer) -> None:
    rows = [{"prompt": text, "label": 0} for text in "abc"]
    path = put(tmp_path, "a.jsonl", *rows)
    one = spec(path)
    then = fingerprint(one, load_prompts(one, tok))
    assert then.differences(fingerprint(one, load_prompts(one, tok))) == []
    limited = spec(path, max_prompt_tokens=5)
    assert then.differences(fingerprint(limited, load_prompts(limited, tok))) == [
        "max_prompt_tokens: None then, 5 now"
    ]
    put(tmp_path, "a.jsonl", *reversed(rows))
    assert "another order" in then.differences(fingerprint(one, load_prompts(one, tok)))[0]
    put(tmp_path, "a.jsonl", *rows, {"prompt": "d", "label": 0})
    assert "there were 3 prompts, now 4" in then.differences(fingerprint(one, load_prompts(one, tok)))
    sliced = spec(f"{path}@[:3]")
    assert any("slice" in line for line in then.differences(fingerprint(sliced, load_prompts(sliced, tok))))


# --- the rest of the contract ---


def test_a_fault_of_every_row_is_told_three_times(tmp_path: Path, tok: HubTokenizer) -> None:
    path = put(tmp_path, "a.jsonl", *(json.dumps({"promt": "y"}) + "\n" for _ in range(50)))
    lines = faults(spec(path), tok)
    assert len(lines) == 4 and "keys here: promt" in lines[0] and "and 47 more bad rows" in lines[3]


def test_all_bad_rows_are_told_up_to_twenty(tmp_path: Path, tok: HubTokenizer) -> None:
    path = put(
        tmp_path, "a.jsonl", *("{\n" if i % 2 else json.dumps({"label": "y" * 500}) + "\n" for i in range(50))
    )
    lines = faults(spec(path), tok)
    assert [line.split(" = ")[0] for line in lines[:20]] == [f"{path}:{n}" for n in range(1, 21)]
    assert "and 30 more bad rows" in lines[20]
    assert len(lines) == 21
    assert "y" * 69 in lines[0]
    assert "y" * 81 not in lines[0]


def test_what_is_shown_of_a_row_stays_on_one_line(tmp_path: Path, tok: HubTokenizer) -> None:
    path = put(tmp_path, "a.jsonl", '{"prompt": "\u2028\x1b[31m\u0085'.encode())
    [line] = faults(spec(path), tok)
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"prompt": NaN, "label": 1}', "NaN is no JSON value"),
        ("[1]", "no object"),
        ('{"prompt": 5, "label": 1}', "the prompt is int"),
        ('{"prompt": {"a": 1}, "label": 1}', "the prompt is dict"),
        ('{"prompt": [1, true], "label": 1}', "item 1 is True"),
        ('{"prompt": [1, -1], "label": 1}', "id -1 at 1"),
        ('{"prompt": [259], "label": 1}', "id 259 at 0 is outside the tokenizer's 0 to 258"),
        ('{"prompt": [{"content": "a"}], "label": 1}', "list of messages, and no chat template"),
        ('{"prompt": "a", "label": 1, "tools": [{"a": 1}]}', "has tools, and no chat template"),
        ('{"prompt": [1], "label": 1, "tools": [{"a": 1}]}', "has tools, and its prompt is a list of ids"),
        ('{"prompt": "a", "label": 1, "tools": "["}', "the tools are no JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"prompt": "a", "label": 1' + "0" * 5000 + "}", "is not JSON that can be read"),
    ],
)
def test_refused_rows(tmp_path: Path, tok: HubTokenizer, text: str, reason: str) -> None:
    [line] = faults(spec(put(tmp_path, "a.jsonl", text), tool_key="tools"), tok)
    assert reason in line


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([{"content": "a"}], "message 0 has no role"),
        ([{"role": "user"}], "message 0 has no content"),
        (["a"], "item 0 is 'a'"),
        ([{"role": "user", "content": "a"}, 5], "message 1 is no object"),
        (tool_talk("{"), "the arguments of a tool call are no JSON"),
    ],
)
def test_refused_conversations(tmp_path: Path, tok: HubTokenizer, prompt: Any, reason: str) -> None:
    [line] = faults(chat(put(tmp_path, "a.jsonl", {"prompt": prompt})), tok)
    assert reason in line


def test_a_template_that_raises_is_told_by_row(tmp_path: Path, tok: HubTokenizer) -> None:
    folder = tmp_path / "strict"
    strict = byte_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    save_tokenizer(strict, folder)
    [line] = faults(chat(put(tmp_path, "a.jsonl", {"prompt": user("a")})), load_tokenizer(folder))
    assert "roles must alternate" in line


def test_options_reach_the_template(tmp_path: Path, tok: HubTokenizer) -> None:
    one = chat(
        put(tmp_path, "a.jsonl", {"prompt": "q"}), chat_template_kwargs={"add_generation_prompt": False}
    )
    assert load_prompts(one, tok)[0].text == "<|bos|>user: q\n"


def test_tools_that_the_template_does_not_show_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "plain"
    plain = byte_tokenizer()
    plain.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    save_tokenizer(plain, folder)
    one = chat(put(tmp_path, "a.jsonl", {"prompt": "q", "tools": [TOOL]}), tool_key="tools")
    with caplog.at_level(logging.WARNING):
        load_prompts(one, load_tokenizer(folder))
    assert "the chat template does not show them" in caplog.text


@pytest.mark.parametrize(
    ("part", "ids"),
    [("[1:3]", [1, 2]), ("[:2]", [0, 1]), ("[-1:]", [4]), ("[3:99]", [3, 4]), ("[:]", [0, 1, 2, 3, 4])],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_slices_keep_the_row_numbers(
    tmp_path: Path, tok: HubTokenizer, part: str, ids: list[int], suffix: str
) -> None:
    rows = [{"prompt": "a", "label": str(i)} for i in range(5)]
    path = put(tmp_path, "a.jsonl", *rows)
    if suffix == "parquet":
        path = str(tmp_path / "a.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path)
    assert [p.prompt_id for p in load_prompts(spec(f"{path}@{part}"), tok)] == [str(i) for i in ids]


def test_a_bad_row_outside_the_slice_does_not_matter(tmp_path: Path, tok: HubTokenizer) -> None:
    path = put(tmp_path, "a.jsonl", {"prompt": "a", "label": 1}, "{bad\n")
    assert len(load_prompts(spec(f"{path}@[:1]"), tok)) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none.jsonl", "no such file"),
        ("a.jsonl@[5:]", "holds no row"),
        ("a.jsonl@[x]", "is no slice"),
        ("a.csv", "'.csv'"),
    ],
)
def test_a_path_that_gives_no_rows(tmp_path: Path, tok: HubTokenizer, name: str, reason: str) -> None:
    put(tmp_path, "a.jsonl", {"prompt": "a", "label": 1})
    put(tmp_path, "a.csv", "prompt,label\n")
    [line] = faults(spec(f"{tmp_path}/{name}"), tok)
    assert reason in line


def test_parquet_has_the_same_rules(tmp_path: Path, tok: HubTokenizer) -> None:
    path = str(tmp_path / "a.parquet")
    rows = [
        {"prompt": user("q"), "label": "007", "metadata": {"k": 1}, "junk": b"\xff"},
        {
            "prompt": [*user("q"), {"role": "assistant", "content": "x", "name": "n"}],
            "label": "7",
            "metadata": None,
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    loaded = load_prompts(chat(path, label_key="label", metadata_key="metadata"), tok)
    assert [(p.text, p.label, p.metadata) for p in loaded] == [
        ("<|bos|>user: q\nassistant: ", "007", {"k": 1}),
        ("<|bos|>user: q\nassistant: x", "7", {}),
    ]
    pq.write_table(pa.table({"prompt": ["a", None], "label": [b"\xff", b"1"]}), path)
    lines = faults(spec(path), tok)
    assert f"{path}:1" in lines[0]
    assert "cannot be written as JSON" in lines[0]
    assert f"{path}:2" in lines[1]
    assert "null" in lines[1]


def test_a_broken_parquet_file_is_a_data_error(tmp_path: Path, tok: HubTokenizer) -> None:
    [line] = faults(spec(put(tmp_path, "a.parquet", "no parquet")), tok)
    assert "no readable Parquet file" in line


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_any_text_survives_file_and_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    """Rows of arbitrary text come back as they were written, raw or escaped."""
    folder = tmp_path_factory.mktemp("rows")
    for raw in (True, False):
        path = folder / f"{raw}.jsonl"
        lines = "".join(json.dumps({"prompt": t}, ensure_ascii=not raw) + "\n" for t in texts)
        path.write_bytes(lines.encode())
        rows, bad = read_rows(str(path), ())
        assert not bad
        assert [row.values["prompt"] for row in rows] == texts


def test_every_text_is_one_token_per_byte_of_the_tiny_tokenizer(tok: HubTokenizer) -> None:
    text = "".join(map(chr, range(1, 300))) + "日本😀\u2028"
    ids = tok.encode(text, special=True)
    assert ids == list(text.encode())
    assert tok.decode(ids) == text


def test_a_folder_without_a_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer could be read"):
        load_tokenizer(tmp_path)


def test_a_missing_chat_template_is_a_model_error_only_where_one_is_asked_for(tmp_path: Path) -> None:
    plain = byte_tokenizer()
    plain.chat_template = None
    save_tokenizer(plain, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    path = put(tmp_path, "a.jsonl", {"prompt": "a", "label": 1})
    assert len(load_prompts(spec(path), tokenizer)) == 1
    with pytest.raises(ModelError, match="has no chat template"):
        load_prompts(chat(path), tokenizer)


def test_eos_ids_come_from_tokenizer_and_generation_config(tmp_path: Path) -> None:
    save_tokenizer(byte_tokenizer(), tmp_path)
    assert load_tokenizer(tmp_path).eos_ids == (257,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 257]}')
    assert load_tokenizer(tmp_path).eos_ids == (7, 257)
