"""Prompts of data sets as `datasets` writes and finds them. Without the hub: everything is a local folder."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from turnout.core.errors import ConfigError, DataError
from turnout.rollout.prompts import DataSpec, fingerprint, load_prompts
from turnout.rollout.tokenizer import HubTokenizer
from turnout.train.model_tokenizer import EOS_ID, byte_tokenizer

datasets = pytest.importorskip("datasets", reason="datasets is a dependency of development only")
TOKENIZER = HubTokenizer(Path("tiny"), byte_tokenizer(), (EOS_ID,))
ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{n} + 1?"}],
        "label": f"00{n}",
        "metadata": {"n": n},
        "unused": n,
    }
    for n in range(5)
]


def spec(path: Any, **more: Any) -> DataSpec:
    return DataSpec(
        str(path), "prompt", "label", "metadata", apply_chat_template=True, **more
    )  # fmt: skip


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def saved(folder: Path, rows: Any = ROWS, **more: Any) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(str(folder), **more)
    return folder


def test_a_saved_folder_is_what_its_rows_are_in_a_file(tmp_path: Path) -> None:
    """Also in several files, shuffled before it was saved, and without `datasets`."""
    folder = saved(tmp_path / "set", num_shards=2)
    prompts = load_prompts(spec(folder), TOKENIZER)
    assert [p.label for p in prompts] == [row["label"] for row in ROWS] and prompts[3].metadata == {"n": 3}
    assert prompts[1].text.endswith("user: 1 + 1?\nassistant: ")
    assert [p.prompt_id for p in load_prompts(spec(f"{folder}@[1:3]"), TOKENIZER)] == ["1", "2"]
    (tmp_path / "rows.parquet").parent.mkdir(exist_ok=True)
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "rows.parquet"))
    assert load_prompts(spec(tmp_path / "rows.parquet"), TOKENIZER) == prompts
    mixed = datasets.Dataset.from_list(ROWS).select([4, 2])
    mixed.save_to_disk(str(tmp_path / "mixed"))
    assert [p.label for p in load_prompts(spec(tmp_path / "mixed"), TOKENIZER)] == ["004", "002"]
    whole = load_prompts(spec(folder, columns=True), TOKENIZER)
    assert whole[2].metadata == {"n": 2, "row": ROWS[2]}


def test_another_data_set_in_its_place_is_refused_on_resume(tmp_path: Path) -> None:
    folder = saved(tmp_path / "set")
    before = fingerprint(spec(folder), load_prompts(spec(folder), TOKENIZER))
    changed = [*ROWS[:4], {**ROWS[4], "label": "5"}]
    other = saved(tmp_path / "other", changed)
    after = fingerprint(spec(other), load_prompts(spec(other), TOKENIZER))
    assert before.differences(after) and before.size > 0
    assert before.differences(fingerprint(spec(folder), load_prompts(spec(folder), TOKENIZER))) == []


def test_what_datasets_finds_is_loaded_by_its_name_and_split(tmp_path: Path) -> None:
    for split, rows in (("train", ROWS[:3]), ("test", ROWS[3:])):
        datasets.Dataset.from_list(rows).to_parquet(
            str(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
        )
    name = f"hub:{tmp_path}"
    assert [p.label for p in load_prompts(spec(name), TOKENIZER)] == ["000", "001", "002"]
    test = spec(name + ':{"split": "test"}@[1:]')
    assert [p.label for p in load_prompts(test, TOKENIZER)] == ["004"]
    assert fingerprint(test, load_prompts(test, TOKENIZER)).size == 0


@pytest.mark.parametrize(
    "name, said",
    [("hub:no-one/has-this", "datasets cannot load it"), ("hub:x:{split}", "the options are no JSON"),
     ("hub:", "names no data set"), ("{folder}", "no state.json"), ("{folder}/both", "splits train, test"),
     ("{folder}/broken", "no readable Arrow file"), ("{folder}/none", "names no data files"),
     ("{folder}/dict", "dict/dataset_dict.json'?: is not what save_to_disk writes"),
     ('hub:{folder}/one:{"split": null}', "no data set of rows but DatasetDict"),
     ('hub:{folder}/one:{"streaming": true}', "no data set of rows but IterableDataset")],
)  # fmt: skip
def test_what_is_wrong_is_told_by_name(tmp_path: Path, name: str, said: str) -> None:
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "both"))
    saved(tmp_path / "broken")
    for folder, file, text in (
        ("none", "state.json", '{"_data_files": []}'),
        ("dict", "dataset_dict.json", "[1]"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(text)
    one.to_parquet(str(tmp_path / "one" / "train.parquet"))
    next((tmp_path / "broken").glob("*.arrow")).write_bytes(b"\x00" * 64)
    with pytest.raises(DataError, match=said):
        load_prompts(spec(name.replace("{folder}", str(tmp_path))), TOKENIZER)


def test_without_datasets_a_name_of_the_hub_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match="pip install datasets"):
        load_prompts(spec("hub:x/y"), TOKENIZER)
