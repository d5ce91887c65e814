"""`turnout model fetch NAME [DIR]` and `turnout model tiny DIR [--kind KIND] [--seed N]`."""

from __future__ import annotations

from pathlib import Path

from turnout.cli.options import Parser


def command(argv: list[str]) -> int:
    """Makes a model folder and prints its path."""
    parser = Parser(prog="turnout model", description="Make a Hugging Face checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="a real pretrained model, cached and checked by digest")
    fetch.add_argument("name", nargs="?", default="smollm2-135m")
    fetch.add_argument("folder", nargs="?", type=Path, help="default: the cache")
    fetch.add_argument("--prefer-hub", action="store_true", help="take the original where a hub is reachable")
    tiny = commands.add_parser("tiny", help="a tiny random model with a byte-level tokenizer, for tests")
    tiny.add_argument("folder", type=Path)
    tiny.add_argument("--kind", default="llama", help="llama, llama-untied, qwen3, qwen3-untied or qwen3-moe")
    tiny.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    from turnout.train import model_zoo

    if arguments.command == "fetch":
        print(model_zoo.fetch(arguments.name, arguments.folder, arguments.prefer_hub))
    else:
        print(model_zoo.tiny(arguments.folder, arguments.kind, arguments.seed))
    return 0
