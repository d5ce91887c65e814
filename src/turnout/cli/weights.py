"""`turnout weights ls | verify | compact`: what a weight store holds, whether it is whole, several deltas made one.

`turnout weights follow` is turnout.cli.weights_follow, `turnout weights map` turnout.cli.weights_map. A store is a
folder, or the URL of an object store; what is read of the latter goes to a temporary folder first.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from turnout.cli.options import Parser, depot_of
from turnout.core.errors import WeightError

if TYPE_CHECKING:
    from turnout.weights.catalog import StoreReader
    from turnout.weights.verify import Verdict

BUCKET_BYTES = 512 << 20


def command(argv: list[str]) -> int:
    """Exit status 0, or that of WeightError where a version is not what its manifest says."""
    if argv[:1] == ["follow"]:
        from turnout.cli.weights_follow import command as follow

        return follow(argv[1:])
    if argv[:1] == ["map"]:
        from turnout.cli.weights_map import command as show_map

        return show_map(argv[1:])
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="turnout weights",
        description="Look into a weight store.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    base = "the checkpoint that the run began with: deltas before the first full version need it"
    for name, run, text in (
        ("ls", _list, "list the versions"),
        ("verify", _verify, "read every byte and prove every version's root"),
        ("compact", _compact, "fold several deltas into one"),
    ):
        sub = commands.add_parser(name, help=text)
        sub.set_defaults(run=run)
        sub.add_argument("store", help="a store: a folder or a URL; for verify also one version's folder")
        if name != "ls":
            sub.add_argument("--base", type=Path, help=base)
        if name == "compact":
            sub.add_argument(
                "--from", dest="first", type=int, required=True, help="a version's number, 0: base"
            )
            sub.add_argument("--to", dest="last", type=int, required=True, help="a later version's number")
            sub.add_argument("--encoding", default="", help="that of the last delta where it is left out")
    for name, text in (  # they have parsers of their own
        ("follow", "keep a host at the newest version"),
        ("map", "tell what each rank of a run holds, and prove that it is all"),
    ):
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _reader(store: str) -> StoreReader:
    from turnout.weights.catalog import StoreReader
    from turnout.weights.object_depot import is_url

    if not is_url(store) and not Path(store).is_dir():
        raise WeightError(f"{store}: no such folder")
    return StoreReader(depot_of(store))


def _list(arguments: argparse.Namespace) -> int:
    from turnout.weights.listing import lines

    for line in lines(_reader(arguments.store).look()):
        print(line)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from turnout.weights.verify import verify, verify_store

    folder = Path(arguments.store)
    if (folder / "manifest.json").is_file():
        print(f"{folder.name}  {verify(folder).version.label}  right")
        return 0
    reader = _reader(arguments.store)
    with _at_hand(arguments.store) as (root, remote):
        fetched = _fetch_all(reader, root) if remote else []
        faults = 0
        for verdict in (*fetched, *verify_store(root, arguments.base)):
            faults += bool(verdict.fault)
            what = "WRONG" if verdict.reachable else "NOT PROVED"
            state = f"{what}: {verdict.fault}" if verdict.fault else "right"
            print(f"{verdict.folder}  {verdict.label}  {state}")
    return WeightError.exit_status if faults else 0


def _fetch_all(reader: StoreReader, root: Path) -> list[Verdict]:
    """Brings every complete folder of a remote store to `root`; what could not be, with the reason."""
    import shutil

    from turnout.weights.verify import Verdict

    found = reader.look()
    whole = {manifest.directory: manifest for manifest in found.versions}
    verdicts = [Verdict(name, "", "incomplete") for name in sorted(found.folders - whole.keys())]
    for name, manifest in whole.items():
        try:
            reader.fetch(manifest, root / name)
        except WeightError as fault:
            shutil.rmtree(root / name)
            verdicts.append(Verdict(name, manifest.version.label, str(fault)))
    return verdicts


def _compact(arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    from turnout.core.rng import random_id
    from turnout.placement.real import DiskStore
    from turnout.weights.fold import fold, folders_needed, plan_fold
    from turnout.weights.mirror import upload
    from turnout.weights.object_depot import ObjectDepot

    reader = _reader(arguments.store)
    found = reader.look()
    plan = plan_fold(found, (arguments.first, arguments.last), arguments.encoding, BUCKET_BYTES)
    plan = replace(plan, base=arguments.base)
    with _at_hand(arguments.store) as (root, remote):
        if remote:
            manifests = {manifest.directory: manifest for manifest in found.usable()}
            for name in folders_needed(found, plan):
                reader.fetch(manifests[name], root / name)
        made = fold(root, found, plan, DiskStore(), random_id())
        if isinstance(reader.depot, ObjectDepot):
            upload(reader.depot, root / made.directory, made)
    print(f"{made.directory}  {made.changed} changes  {made.nbytes / 1e6:.2f} MB  {made.encoding}")
    return 0


@contextmanager
def _at_hand(store: str) -> Iterator[tuple[Path, bool]]:
    """The folder of a store, or an empty temporary one for the files of a remote store."""
    from turnout.weights.object_depot import is_url

    if not is_url(store):
        yield Path(store), False
        return
    with tempfile.TemporaryDirectory(prefix="turnout-weights-") as folder:
        yield Path(folder), True
