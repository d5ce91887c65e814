"""The YAML and JSON that a configuration may be written in."""

from __future__ import annotations

import pytest

from turnout.config.file import MAX_BYTES, read_file
from turnout.core.errors import ConfigError


def read(tmp_path, text, name="a.yaml"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_file(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E6", 1e6),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("012", 12),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("true", True),
        ("False", False),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("~", None),
        ("null", None),
        ("", None),
        ("'8'", "8"),
        ("+", "+"),
        ("-", None),
        ("[1, 2e0]", [1, 2.0]),
        ("1.", 1.0),
        ("1.2.3", "1.2.3"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(tmp_path, text, value):
    if text == "-":  # a list of nothing
        value = [None]
        text = "\n- "
    got = read(tmp_path, f"key: {text}\n").values["key"]
    assert got == value and type(got) is type(value)


def test_lines_and_twice_standing_keys_at_any_depth(tmp_path):
    found = read(tmp_path, "a: 1\nb: {c: 1, c: 2}\na: 2\n")
    assert found.lines["b"] == 2
    assert sorted((f.where, f.value) for f in found.faults) == [("a.yaml:2", "c"), ("a.yaml:3", "a")]


def test_json_keys_twice(tmp_path):
    found = read(tmp_path, '{"a": 1, "b": {"c": 1, "c": 2}, "a": null}', "a.json")
    assert [f.value for f in found.faults] == ["c", "a"]
    assert found.values["a"] is None


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "a: [1\nb: 2\n", "not YAML"),
        ("a.yaml", "- 1\n", "no mapping"),
        ("a.yaml", "just text\n", "no mapping"),
        ("a.yaml", "a: !!python/object:os.system x\n", "not YAML"),
        ("a.yaml", "a: &a [x]\nb: *a\n", "aliases"),
        ("a.yaml", "a: &a [*a]\n", "aliases"),
        ("a.yaml", "b: &b {c: 1}\na: {<<: *b}\n", "aliases"),
        ("a.yaml", "a: " + "[" * 5000, "not YAML"),
        ("a.json", "[" * 200_000, "not JSON"),
        ("a.json", '{"seed": ' + "9" * 5000 + "}", "not JSON"),
        ("a.yaml", "seed: " + "9" * 5000, "not YAML"),
        ("a.yaml", "? [1, 2]\n: 3\n", "not YAML"),
        ("a.json", "[1]", "no mapping"),
        ("a.json", '{"a": 1,}', "not JSON"),
        ("a.json", "", "not JSON"),
        ("a.yaml", b"a: \xff\n", "not UTF-8"),
        ("a.toml", "a = 1", "not a .yaml"),
        ("a.yaml", b"#" * (MAX_BYTES + 1), "larger than"),
    ],
)
def test_a_file_that_can_not_be_read_is_one_fault(tmp_path, name, text, said):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, name)
    assert said in str(caught.value) and name in str(caught.value)


def test_the_line_of_a_syntax_error(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.yaml:3"):
        read(tmp_path, "a: 1\nb: 2\nc: d: e\n")


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_file(tmp_path / "none.yaml")


def test_an_empty_file_and_a_byte_order_mark(tmp_path):
    assert read(tmp_path, "# nothing\n").values == {}
    assert read(tmp_path, "\ufeffa: 1\r\n").values == {"a": 1}


def test_a_key_that_is_no_text(tmp_path):
    assert "must be text" in read(tmp_path, "1: 2\n").faults[0].reason
