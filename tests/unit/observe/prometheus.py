"""A strict reader of Prometheus' text format: more is refused than Prometheus itself would refuse."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

HELP = re.compile(r"# HELP ([a-zA-Z_:][a-zA-Z0-9_:]*) (\S.*)")
TYPE = re.compile(r"# TYPE ([a-zA-Z_:][a-zA-Z0-9_:]*) (counter|gauge|histogram)")
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"')
ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


class Malformed(Exception):
    pass


@dataclass
class Sample:
    name: str
    labels: dict[str, str]
    value: float


@dataclass
class Family:
    kind: str
    samples: list[Sample] = field(default_factory=list)


def parse(text: str) -> dict[str, Family]:
    """Families by name; raises Malformed."""
    if not text.endswith("\n"):
        raise Malformed("the last line has no end")
    families: dict[str, Family] = {}
    lines = text.splitlines()
    name, at = "", 0
    while at < len(lines):
        if lines[at].startswith("#"):
            head, kind = HELP.fullmatch(lines[at]), TYPE.fullmatch(lines[at + 1])
            if head is None or kind is None or head[1] != kind[1] or head[1] in families:
                raise Malformed(f"line {at + 1}: {lines[at]}")
            name, at = head[1], at + 2
            families[name] = Family(kind[2])
            continue
        sample = _sample(lines[at])
        base = (
            re.sub("_(bucket|sum|count)$", "", sample.name)
            if _is(families, name, "histogram")
            else sample.name
        )
        if not name or base != name:
            raise Malformed(f"line {at + 1}: not under its head: {lines[at]}")
        families[name].samples.append(sample)
        at += 1
    for name, family in families.items():
        _check(name, family)
    return families


def _is(families: dict[str, Family], name: str, kind: str) -> bool:
    return name in families and families[name].kind == kind


def _sample(line: str) -> Sample:
    match = SAMPLE.fullmatch(line)
    if match is None:
        raise Malformed(line)
    labels: dict[str, str] = {}
    rest = match[2] or ""
    while rest:
        label = LABEL.match(rest)
        if label is None or label[1] in labels:
            raise Malformed(line)
        labels[label[1]] = re.sub(r'\\[\\"n]', lambda found: ESCAPES[found[0]], label[2])
        rest = rest[label.end() :]
        if rest and not (rest.startswith(",") and len(rest) > 1):
            raise Malformed(line)
        rest = rest[1:]
    return Sample(match[1], labels, float(match[3]))


def _check(name: str, family: Family) -> None:
    keys = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
    if len(set(keys)) < len(keys):
        raise Malformed(f"{name}: a sample stands twice")
    if (family.kind == "counter") != name.endswith("_total"):
        raise Malformed(f"{name}: only counters end with _total, and all do")
    if family.kind == "counter" and any(sample.value < 0 for sample in family.samples):
        raise Malformed(f"{name}: a counter below 0")
    if family.kind == "histogram":
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        values = [sample.value for sample in buckets]
        count = [sample.value for sample in family.samples if sample.name.endswith("_count")]
        if values != sorted(values) or buckets[-1].labels["le"] != "+Inf" or count != values[-1:]:
            raise Malformed(f"{name}: its buckets")
