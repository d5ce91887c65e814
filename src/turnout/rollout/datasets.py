"""Rows of data sets as Hugging Face's `datasets` keeps them: a folder of save_to_disk, or a data set of the hub.

`PATH` is a folder that save_to_disk wrote (read with pyarrow: `datasets` need not be installed); `hub:NAME` with
options as JSON, `hub:NAME:{"name": "main", "split": "train", "revision": "..."}`, is a data set that `datasets`
finds, of the hub or a local folder; split "train" unless another is given. Promises: a value has the type that the
data set gives it; a folder of several splits is refused with their names; whatever `datasets` says against a name
is told as a DataError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from turnout.core.errors import ConfigError, DataError, Fault

PREFIX = "hub:"
WHAT = "prompt data"


def is_hub(text: str) -> bool:
    return text.startswith(PREFIX)


def saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder of save_to_disk, in order; raises DataError for another folder."""
    state, splits = folder / "state.json", folder / "dataset_dict.json"
    if splits.is_file():
        try:
            names = [str(name) for name in json.loads(splits.read_text(encoding="utf-8"))["splits"]]
        except (OSError, ValueError, KeyError, TypeError) as fault:
            _refuse(str(splits), f"is not what save_to_disk writes: {fault!r}", "save the data set again")
        first = names[0] if names else ""
        _refuse(str(folder), f"it holds the splits {', '.join(names)}", f"give {folder}/{first}")
    if not state.is_file():
        reason = "the folder holds no data set of save_to_disk (no state.json)"
        _refuse(str(folder), reason, "give a .jsonl or .parquet file, or hub:FOLDER for what datasets reads")
    try:
        rows = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
        files = [folder / row["filename"] for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        _refuse(str(state), f"is not what save_to_disk writes: {fault!r}", "save the data set again")
    if not files:
        _refuse(str(state), "names no data files", "save the data set again")
    return files


def saved_table(folder: Path, columns: tuple[str, ...] | None) -> Any:
    """All rows of such a folder, these columns of them (None: all), as a pyarrow.Table."""
    import pyarrow as pa  # noqa: PLC0415

    tables: list[Any] = []
    for path in saved_files(folder):
        try:
            with pa.memory_map(str(path)) as source:
                table = pa.ipc.open_stream(source).read_all()
        except (pa.ArrowException, OSError) as fault:
            _refuse(str(path), f"is no readable Arrow file: {fault}", "save the data set again")
        tables.append(_of(table, columns))
    return pa.concat_tables(tables)


def _of(table: Any, columns: tuple[str, ...] | None) -> Any:
    return table.select([name for name in table.column_names if columns is None or name in columns])


def hub_table(text: str, columns: tuple[str, ...] | None) -> Any:
    """All rows of `hub:NAME[:{options}]`, as `saved_table`."""
    name, options = _parts(text)
    try:
        from datasets import Dataset, load_dataset  # noqa: PLC0415
        from datasets.exceptions import DatasetsError  # noqa: PLC0415
    except ImportError:
        reason, remedy = "datasets is not installed", "pip install datasets"
        raise ConfigError(Fault(WHAT, text, reason, remedy)) from None
    try:
        found: Any = load_dataset(name, **{"split": "train", **options})
    except (OSError, ValueError, TypeError, KeyError, ImportError, DatasetsError) as fault:
        reason = f"datasets cannot load it: {type(fault).__name__}: {fault}"
        _refuse(text, reason, "check name, options and network")
    if not isinstance(found, Dataset):  # of several splits, or streamed
        reason = f"with these options it is no data set of rows but {type(found).__name__}"
        _refuse(text, reason, 'name one split, without "streaming"')
    return _of(found.with_format("arrow")[:], columns)


def _parts(text: str) -> tuple[str, dict[str, Any]]:
    name, mark, raw = text.removeprefix(PREFIX).partition(":{")
    remedy = 'write hub:NAME:{"split": "train"}'
    try:
        options = json.loads("{" + raw) if mark else {}
    except ValueError as fault:
        _refuse(text, f"the options are no JSON: {fault}", remedy)
    if not name:
        _refuse(text, "names no data set", remedy)
    return name, options


def _refuse(value: str, reason: str, remedy: str) -> NoReturn:
    raise DataError(Fault(WHAT, value, reason, remedy)) from None
