"""Prometheus' text format 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats).

Promises: a metric has its help and its type once, above all of its samples; label values are escaped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts per bucket; `bounds` are upper limits, in ascending order, the last bucket is infinite."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Exposition:
    """Collects metrics and renders them; `labels` stand at each sample."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels, self._lines = dict(labels), list[str]()

    def value(self, name: str, kind: str, said: str, value: float, **labels: str) -> None:
        """One counter or gauge with its help text."""
        self.family(name, kind, said, [(labels, value)])

    def family(
        self, name: str, kind: str, said: str, samples: Iterable[tuple[Mapping[str, str], float]]
    ) -> None:
        """A counter or gauge with a sample for each set of labels."""
        self._head(name, kind, said)
        self._lines += [f"{name}{self._braced(labels)} {_number(value)}" for labels, value in samples]

    def histogram(self, name: str, said: str, of: Histogram) -> None:
        self._head(name, "histogram", said)
        below = 0
        for bound, count in zip((*of.bounds, None), of.counts):
            below += count
            at = "+Inf" if bound is None else _number(bound)
            self._lines.append(f"{name}_bucket{self._braced({'le': at})} {below}")
        self._lines.append(f"{name}_sum{self._braced({})} {_number(of.total)}")
        self._lines.append(f"{name}_count{self._braced({})} {below}")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _head(self, name: str, kind: str, said: str) -> None:
        self._lines += [f"# HELP {name} {said}", f"# TYPE {name} {kind}"]

    def _braced(self, more: Mapping[str, str]) -> str:
        pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in {**self._labels, **more}.items())
        return f"{{{pairs}}}" if pairs else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)
