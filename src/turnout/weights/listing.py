"""A store as lines of text: one for each folder of a version, for `turnout weights ls`. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime

from turnout.core.errors import WeightError
from turnout.weights.catalog import Catalog
from turnout.weights.chain import cheapest
from turnout.weights.manifest import DELTA, WeightManifest

HEAD = (
    *("version", "folder", "kind", "encoding", "step", "MB", "base", "chain"),
    *("density", "written", "incarnation", "state"),
)


def lines(found: Catalog) -> Iterator[str]:
    """A table: the label and folder of each version, what it is relative to, how many deltas a joiner applies to
    have it, how dense its changes are, the run's incarnation, and whether it is published, abandoned or broken."""
    rows = [HEAD, *(_row(found, manifest) for manifest in found.versions)]
    whole = {manifest.directory for manifest in found.versions}
    rows += [("-", folder, *["-"] * 9, "incomplete") for folder in sorted(found.folders - whole)]
    for counter, version in sorted(found.records.items()):
        if all(manifest.version.counter != counter for manifest in found.versions):
            state = "abandoned" if found.lineage.abandoned(version) else "published, no folder"
            rows.append((version.label, *["-"] * 9, str(version.incarnation), state))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    yield f"run {found.identity.run_id}, base root {found.identity.base_root}"
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def _row(found: Catalog, manifest: WeightManifest) -> tuple[str, ...]:
    version = manifest.version
    delta = manifest.kind == DELTA
    elements = sum(math.prod(entry.shape) for entry in manifest.tensors.values())
    written = (
        datetime.fromtimestamp(manifest.time, UTC).strftime("%Y-%m-%d %H:%M:%S") if manifest.time else "-"
    )
    return (
        version.label,
        manifest.directory,
        manifest.kind,
        manifest.encoding if delta else "-",
        str(manifest.step),
        f"{manifest.nbytes / 1e6:.2f}",
        manifest.base.label if manifest.base is not None else "-",
        _chain(found, manifest),
        f"{manifest.changed / max(1, elements):.2%}" if delta else "-",
        written,
        str(version.incarnation),
        _state(found, manifest),
    )


def _chain(found: Catalog, manifest: WeightManifest) -> str:
    if manifest.kind != DELTA:
        return "0"
    try:
        return str(len(cheapest(found.usable(), manifest.version.root, found.identity.base_root).deltas))
    except WeightError:
        return "broken"


def _state(found: Catalog, manifest: WeightManifest) -> str:
    if found.lineage.abandoned(manifest.version):
        return "abandoned"
    if manifest.run_id != found.identity.run_id:
        return f"foreign: of run {manifest.run_id}"
    if not found.published(manifest):
        return "not published"
    return "newest" if manifest.version == found.newest else "published"
