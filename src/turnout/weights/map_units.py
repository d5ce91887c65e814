"""A checkpoint's tensors taken apart into units: the single matrices and vectors that topologies divide. Pure.

A checkpoint may keep projections fused and experts stacked or each by itself; a unit says where it lies there.
Promises: every tensor of the checkpoint becomes units, or is listed as trimmed, or is a problem; every unit that
the model's layers must have is there, or is a problem; both kinds name the nearest candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from turnout.weights.map_rules import DERIVED, EMBEDDING, EXPERT, HEAD, LAYER, ROUTER, Rule, nearest, rule_of
from turnout.weights.map_types import Model, Param, Problem

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Unit:
    """`name`: what it is called where nothing is fused. It lies in the checkpoint's tensor `home` from `at` on;
    `home` may have leading axes that the unit lacks."""

    name: str
    rule: Rule
    dtype: str
    shape: tuple[int, ...]
    home: str
    at: tuple[int, ...]

    @cached_property
    def layer(self) -> int | None:
        found = LAYER.search(self.name)
        return int(found[1]) if found else None

    @cached_property
    def expert(self) -> int | None:
        found = EXPERT.match(self.name)
        return int(found[2]) if found else None


@dataclass
class Units:
    """`trimmed`: checkpoint tensors that no rank needs, each with the reason."""

    units: list[Unit] = field(default_factory=list)
    trimmed: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def take_apart(model: Model) -> Units:
    """All units of a model. The head of a tied model is none: its embedding serves for both."""
    found = Units()
    strange: list[str] = []
    counts = Counter(param.name for param in model.params)
    found.problems += [Problem(n, f"comes {times} times") for n, times in counts.items() if times > 1]
    for param in model.params:
        units = list(_units(param, model))
        if not units:
            strange.append(param.name)
        elif units[0].rule.kind == DERIVED:
            found.trimmed.append((param.name, "derived from the config"))
        elif model.tied and units[0].rule.kind == "head":
            found.trimmed.append((param.name, "tied: the same values as the embedding"))
        else:
            found.units += units
    names = {unit.name for unit in found.units}
    missing = sorted(_expected(model, names) - names)
    for name in strange:
        near = nearest(name, _like(name, missing) or _like(name, names))
        found.problems.append(Problem(name, "no rule says where it belongs", near))
    found.problems += [Problem(name, "is missing", nearest(name, strange)) for name in missing]
    return found


def _units(param: Param, model: Model) -> Iterator[Unit]:
    """The units in one tensor; none: no rule knows it."""
    stem, _, leaf = param.name.rpartition(".")
    if len(param.shape) == 3 and stem.endswith(".experts") and leaf in ("gate_up_proj", "down_proj"):
        experts, rows, columns = param.shape
        names = ("down_proj",) if leaf == "down_proj" else SIBLINGS[1]
        sizes = dict.fromkeys(names, rows // len(names))
        for expert in range(experts):
            for name, at, count in _laid(sizes):
                yield _unit(param, f"{stem}.{expert}.{name}.weight", (count, columns), (expert, at, 0))
        return
    owner, _, fused = stem.rpartition(".")
    sizes = _fused_rows(fused, param.shape, model)
    if sizes is not None:
        for name, at, count in _laid(sizes):
            shape, rest = (count, *param.shape[1:]), (0,) * (len(param.shape) - 1)
            yield _unit(param, f"{owner}.{name}.{leaf}", shape, (at, *rest))
    elif rule_of(param.name) is not None:
        yield _unit(param, param.name, param.shape, (0,) * len(param.shape))


def _unit(param: Param, name: str, shape: tuple[int, ...], at: tuple[int, ...]) -> Unit:
    rule = rule_of(name)
    assert rule is not None
    return Unit(name, rule, param.dtype, shape, param.name, at)


def _fused_rows(leaf: str, shape: tuple[int, ...], model: Model) -> dict[str, int] | None:
    if leaf == "gate_up_proj":
        return dict.fromkeys(SIBLINGS[1], shape[0] // 2)
    if leaf == "qkv_proj":
        head = shape[0] // (model.heads + 2 * model.kv_heads)
        return dict(zip(SIBLINGS[0], (model.heads * head, model.kv_heads * head, model.kv_heads * head)))
    return None


def _laid(sizes: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    at = 0
    for name, count in sizes.items():
        yield name, at, count
        at += count


def _expected(model: Model, names: set[str]) -> set[str]:
    """Every unit that must be there: what one layer of a kind (with experts, without) has, all of that kind have;
    of siblings that are fused somewhere, all; every expert; embedding and, unless tied, head."""
    layers: dict[int, set[str]] = {layer: set() for layer in range(model.layers)}
    others: set[str] = set()
    for name in names:
        found = LAYER.search(name)
        if found is None:
            others.add(name)
        else:
            layers.setdefault(int(found[1]), set()).add(LAYER.sub(".layers.{L}.", name))
    kinds: dict[bool, set[str]] = {True: set(), False: set()}
    sparse = {layer: any(_is_router(n) for n in held) for layer, held in layers.items()}
    for layer, held in layers.items():
        kinds[sparse[layer]] |= {_any_expert(name) for name in held}
    expected = set(others)
    for layer in layers:
        templates = kinds[sparse[layer]] or kinds[not sparse[layer]]
        for name in _with_siblings(templates):
            mine = name.replace("{L}", str(layer))
            expected |= (
                {mine.replace("{E}", str(e)) for e in range(model.experts)} if "{E}" in mine else {mine}
            )
    stem = next((n.removesuffix(EMBEDDING) for n in others if n.endswith(EMBEDDING)), "model.")
    expected |= {stem + EMBEDDING, f"{stem}norm.weight"}
    return expected if model.tied or any(n.endswith(HEAD) for n in others) else expected | {HEAD}


def _with_siblings(names: Iterable[str]) -> set[str]:
    found = set(names)
    for name in list(found):
        for group in SIBLINGS:
            member = next((m for m in group if f".{m}." in name), None)
            if member is not None:
                found |= {name.replace(f".{member}.", f".{other}.") for other in group}
    return found


def _is_router(name: str) -> bool:
    rule = rule_of(name)
    return rule is not None and rule.kind == ROUTER


def _any_expert(name: str) -> str:
    found = EXPERT.match(name)
    return f"{found[1]}.{{E}}.{found[3]}" if found else name


def _like(name: str, names: Iterable[str]) -> list[str]:
    """Those of the same layer: a model has too many names to compare with each."""
    found = LAYER.search(name)
    return [n for n in names if (f := LAYER.search(n)) is None or (found is not None and f[1] == found[1])]
