"""`turnout weights ls DIR` and `turnout weights verify DIR`: what a weight store holds, and whether it is whole;
`turnout weights follow` is turnout.cli.weights_follow, `turnout weights map` turnout.cli.weights_map."""

from __future__ import annotations

import argparse
from pathlib import Path

from turnout.core.errors import WeightError


def command(argv: list[str]) -> int:
    """Exit status 0, or that of WeightError where a version is not what its manifest says."""
    if argv[:1] == ["follow"]:
        from turnout.cli.weights_follow import command as follow

        return follow(argv[1:])
    if argv[:1] == ["map"]:
        from turnout.cli.weights_map import command as show_map

        return show_map(argv[1:])
    parser = argparse.ArgumentParser(
        prog="turnout weights",
        description="Look into a weight store.",
        epilog="turnout weights follow keeps a host at its newest version; map RUN.yaml tells what ranks hold",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("ls", "list the versions"), ("verify", "read every tensor and compare its digest")):
        commands.add_parser(name, help=text).add_argument(
            "folder", type=Path, help="a store, or one version's folder"
        )
    arguments = parser.parse_args(argv)
    folders = _versions(arguments.folder)
    return _list(folders) if arguments.command == "ls" else _verify(folders)


def _versions(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise WeightError(f"{folder}: no such folder")
    if folder.name.startswith("weight_v"):
        return [folder]
    found = sorted(path for path in folder.iterdir() if path.name.startswith("weight_v"))
    if not found:
        raise WeightError(f"{folder} holds no version (folders named weight_v...)")
    return found


def _list(folders: list[Path]) -> int:
    from turnout.weights.manifest import load_manifest

    for folder in folders:
        try:
            manifest = load_manifest(folder)
        except WeightError as fault:
            print(f"{folder.name}  incomplete: {fault}")
            continue
        size = sum(manifest.files.values())
        print(
            f"{manifest.version.label}  {manifest.kind}  step {manifest.step}  {size / 1e6:.1f} MB  {folder}"
        )
    return 0


def _verify(folders: list[Path]) -> int:
    from turnout.weights.verify import verify

    faults = 0
    for folder in folders:
        try:
            print(f"{folder.name}  {verify(folder).version.label}  right")
        except WeightError as fault:
            faults += 1
            print(f"{folder.name}  WRONG: {fault}")
    return WeightError.exit_status if faults else 0
