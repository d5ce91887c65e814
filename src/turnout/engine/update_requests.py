"""The bodies of weight update calls as typed values; a refusal is a BadRequest with all faults of the body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnout.core.errors import Fault, WeightError
from turnout.engine.delta import is_delta
from turnout.engine.requests import RID_MAX, BadRequest
from turnout.engine.settings import EngineSettings
from turnout.engine.tensor_wire import FLATTENED
from turnout.engine.update_group import Membership
from turnout.weights.buckets import Slot, dtype_of, slots
from turnout.weights.delta_bucket import Part, parts
from turnout.weights.manifest import DELTA

GROUP_DEFAULT = "weight_update_group"
ACTIONS = ("snapshot", "reset_tensors", "compare", "checksum")


@dataclass(frozen=True)
class Flags:
    """What an update does besides changing weights. `label` None means: what the weights' manifest names, else
    a name made of their root digest. `flush`: running requests recompute their KV on the new weights."""

    label: str | None
    abort_all: bool
    flush: bool


@dataclass(frozen=True)
class Update:
    """A checkpoint folder to load or prepare; `store`: a version's folder, reached the cheapest way."""

    folder: Path
    flags: Flags
    store: bool = False


@dataclass(frozen=True)
class TensorUpdate:
    """`entries`: one base64 pickle per tensor parallel rank."""

    entries: list[str]
    load_format: str | None
    flags: Flags


@dataclass(frozen=True)
class GroupUpdate:
    """What comes through a group: as one run of bytes (`flat`), or a broadcast for each tensor."""

    group: str
    slots: list[Slot]
    flat: bool
    flags: Flags


@dataclass(frozen=True)
class GroupChanges:
    """A bucket of changes that comes through a group (turnout.weights.delta_bucket)."""

    group: str
    parts: list[Part]
    flags: Flags


@dataclass(frozen=True)
class WeightCheck:
    """`skip`: parts of names of tensors that are left out."""

    action: str
    skip: tuple[str, ...]


def parse_update(row: dict[str, Any], settings: EngineSettings) -> Update:
    """Defaults as in SGLang 0.5.23: abort_all_requests false, flush_cache true."""
    faults: list[Fault] = []
    path, load_format = row.get("model_path"), row.get("load_format")
    if not isinstance(path, str) or not path or "\0" in path:
        raise BadRequest(Fault("model_path", str(path), "must be a folder"))
    if load_format not in (None, "auto", "safetensors", DELTA):
        faults.append(Fault("load_format", str(load_format), f"must be auto, safetensors or {DELTA}"))
    flags = _flags(row, faults)
    folder = Path(path).resolve()
    store = load_format == DELTA or (load_format in (None, "auto") and is_delta(folder))
    read = folder.parent if store else folder  # the way to a version leads through others of its store
    if not allowed_folder(read, settings):
        faults.append(Fault("model_path", path, "lies outside the folders that updates may read from"))
    _refuse(faults)
    return Update(folder, flags, store)


def allowed_folder(folder: Path, settings: EngineSettings) -> bool:
    """Whether updates may read from a folder, given resolved: under the roots, or anywhere on loopback without.
    The checkpoint that the engine was started with may be read again."""
    roots = [root.resolve() for root in settings.allowed_roots]
    known = folder == settings.model_path.resolve() or any(folder.is_relative_to(root) for root in roots)
    return known or (not roots and settings.loopback)


def parse_tensors(row: dict[str, Any]) -> TensorUpdate:
    faults: list[Fault] = []
    entries, load_format = row.get("serialized_named_tensors"), row.get("load_format")
    if not isinstance(entries, list) or not entries or not all(isinstance(e, str) for e in entries):
        faults.append(Fault("serialized_named_tensors", "", "must be a list of base64 texts, one per rank"))
    _load_format(load_format, faults)
    flags = _flags(row, faults)
    _refuse(faults)
    return TensorUpdate(list(entries or []), load_format, flags)


def parse_group_update(row: dict[str, Any], bytes_max: int) -> GroupUpdate:
    """`bytes_max` bounds what is received at a time."""
    faults: list[Fault] = []
    names, dtypes, shapes = row.get("names"), row.get("dtypes"), row.get("shapes")
    lists = [value for value in (names, dtypes, shapes) if isinstance(value, list)]
    if len(lists) < 3 or len({len(value) for value in lists}) > 1:
        raise BadRequest(Fault("names", "", "names, dtypes and shapes must be lists of the same length"))
    if not all(_is_shape(shape) for shape in shapes or []) or not all(
        isinstance(n, str) for n in names or []
    ):
        raise BadRequest(Fault("shapes", "", "each name is a text, each shape a list of sizes"))
    _load_format(row.get("load_format"), faults)
    flags = _flags(row, faults)
    placed: list[Slot] = []
    try:
        described = [(n, dtype_of(d), s) for n, d, s in zip(names or [], dtypes or [], shapes or [])]
        placed = slots(described, aligned=row.get("load_format") == FLATTENED)
    except WeightError as fault:
        faults.append(Fault("shapes", "", str(fault)))
    total = placed[-1].end if placed else 0
    if total > bytes_max:
        faults.append(Fault("shapes", f"{total} bytes", f"one call may bring {bytes_max} bytes"))
    _refuse(faults)
    return GroupUpdate(_group(row), placed, row.get("load_format") == FLATTENED, flags)


def parse_group_changes(row: dict[str, Any], bytes_max: int) -> GroupChanges:
    """A call with `load_format` delta_bucket: beside names, dtypes and shapes it has `counts`, how many elements of
    each tensor the bucket changes. `bytes_max` bounds what is received at a time."""
    faults: list[Fault] = []
    lists = [row.get(name) for name in ("names", "dtypes", "shapes", "counts")]
    if not all(isinstance(value, list) for value in lists) or len({len(value or []) for value in lists}) > 1:
        raise BadRequest(
            Fault("names", "", "names, dtypes, shapes and counts must be lists of the same length")
        )
    names, dtypes, shapes, counts = (list(value or []) for value in lists)
    typed = all(isinstance(name, str) for name in names) and all(type(count) is int for count in counts)
    if not typed or not all(_is_shape(shape) for shape in shapes):
        raise BadRequest(Fault("shapes", "", "names are texts, shapes lists of sizes, counts whole numbers"))
    if row.get("slices") is not None:
        faults.append(Fault("slices", str(row["slices"])[:40], "is not known here: changes come in whole"))
    flags = _flags(row, faults)
    placed: list[Part] = []
    try:
        placed = parts([(n, dtype_of(d), s, c) for n, d, s, c in zip(names, dtypes, shapes, counts)])
    except WeightError as fault:
        faults.append(Fault("counts", "", str(fault)))
    total = placed[-1].end if placed else 0
    if total > bytes_max:
        faults.append(Fault("counts", f"{total} bytes", f"one call may bring {bytes_max} bytes"))
    _refuse(faults)
    return GroupChanges(_group(row), placed, flags)


def parse_root(row: dict[str, Any], name: str) -> str | None:
    """A root digest: `base_root` of /begin_weight_update, `root` of /end_weight_update; both ours."""
    root = row.get(name)
    if root is not None and (not isinstance(root, str) or not 0 < len(root) <= RID_MAX):
        raise BadRequest(Fault(name, str(root)[:40], "must be a root digest"))
    return root


def parse_membership(row: dict[str, Any]) -> Membership:
    faults: list[Fault] = []
    host, backend = row.get("master_address"), row.get("backend", "nccl")
    if not isinstance(host, str) or not host:
        faults.append(Fault("master_address", str(host)[:40], "must be a host"))
    if backend != "gloo":
        faults.append(Fault("backend", str(backend)[:40], "must be gloo: this engine computes on the CPU"))
    numbers = {name: row.get(name) for name in ("master_port", "rank_offset", "world_size")}
    numbers["ranks"] = row.get("ranks", 1)
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65536:
            faults.append(Fault(name, str(value)[:40], "must be a whole number above 0"))
    limit_s = row.get("timeout_s")
    if limit_s is not None and (
        isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or limit_s <= 0
    ):
        faults.append(Fault("timeout_s", str(limit_s)[:40], "must be seconds above 0"))
    _refuse(faults)
    port, rank, world, ranks = (int(numbers[name] or 0) for name in numbers)
    if rank + ranks > world:
        raise BadRequest(Fault("rank_offset", str(rank), f"lies outside a group of {world}"))
    return Membership(_group(row), str(host).strip("[]"), port, rank, world, ranks, limit_s)


def parse_group(row: dict[str, Any]) -> str:
    return _group(row)


def parse_activation(row: dict[str, Any]) -> tuple[str, Flags]:
    """prepared_id and flags of /activate_weights; the label was fixed when the set was prepared."""
    faults: list[Fault] = []
    prepared = row.get("prepared_id")
    if not isinstance(prepared, str) or not prepared:
        faults.append(Fault("prepared_id", str(prepared)[:40], "must be what /prepare_weights returned"))
    flags = _flags(row, faults)
    _refuse(faults)
    return str(prepared), flags


def parse_label(row: dict[str, Any]) -> tuple[str, bool]:
    """Label and whether to abort all requests (SGLang's default is true) of /update_weight_version."""
    faults: list[Fault] = []
    label = _label(row, "new_version", faults)
    if label is None and not faults:
        faults.append(Fault("new_version", "", "must be a text"))
    abort_all = _boolean(row, "abort_all_requests", True, faults)
    _refuse(faults)
    return str(label), abort_all


def parse_tags(row: dict[str, Any]) -> tuple[str, ...] | None:
    """Memory tags; None for all."""
    tags = row.get("tags")
    if tags is None or tags == []:
        return None
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise BadRequest(Fault("tags", str(tags)[:40], "must be a list of texts"))
    return tuple(dict.fromkeys(tags))


def parse_read(row: dict[str, Any]) -> tuple[str, int]:
    """Name and number of values of /get_weights_by_name; SGLang's default is 100."""
    name, limit = row.get("name"), row.get("truncate_size", 100)
    if not isinstance(name, str) or not name:
        raise BadRequest(Fault("name", str(name)[:40], "must be the name of a tensor"))
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise BadRequest(Fault("truncate_size", str(limit)[:40], "must be a whole number of at least 0"))
    return name, limit


def parse_check(row: dict[str, Any]) -> WeightCheck:
    action, skip = row.get("action", "checksum"), row.get("skip_tensor_list")
    if action not in ACTIONS:
        raise BadRequest(Fault("action", str(action)[:40], f"must be one of {', '.join(ACTIONS)}"))
    if skip is not None and (not isinstance(skip, list) or not all(isinstance(s, str) for s in skip)):
        raise BadRequest(Fault("skip_tensor_list", str(skip)[:40], "must be a list of texts"))
    return WeightCheck(action, tuple(skip or ()))


def _flags(row: dict[str, Any], faults: list[Fault]) -> Flags:
    return Flags(
        _label(row, "weight_version", faults),
        _boolean(row, "abort_all_requests", False, faults),
        _boolean(row, "flush_cache", True, faults),
    )


def _label(row: dict[str, Any], name: str, faults: list[Fault]) -> str | None:
    label = row.get(name)
    if label is not None and (not isinstance(label, str) or not 0 < len(label) <= RID_MAX):
        faults.append(Fault(name, str(label)[:40], "must be a text"))
        return None
    return label


def _boolean(row: dict[str, Any], name: str, default: bool, faults: list[Fault]) -> bool:
    value = row.get(name, default)
    if not isinstance(value, bool):
        faults.append(Fault(name, str(value)[:40], "must be true or false"))
    return bool(value)


def _load_format(value: Any, faults: list[Fault]) -> None:
    if value not in (None, FLATTENED):
        faults.append(Fault("load_format", str(value)[:40], f"must be null or {FLATTENED}"))


def _group(row: dict[str, Any]) -> str:
    name = row.get("group_name", GROUP_DEFAULT)
    if not isinstance(name, str) or not 0 < len(name) <= RID_MAX:
        raise BadRequest(Fault("group_name", str(name)[:40], "must be a text"))
    return name


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(side) is int and side >= 0 for side in value)


def _refuse(faults: Sequence[Fault]) -> None:
    if faults:
        raise BadRequest(list(faults))
