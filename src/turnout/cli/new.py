"""`turnout new [DIR] [--task TASK]`: a run to begin with, that runs as it is (turnout.cli.new_files).

Promises: nothing that exists is overwritten: where one of the files is there, none is written.
"""

from __future__ import annotations

import os
from pathlib import Path

from turnout.cli.new_files import SECTIONS, files
from turnout.cli.options import Parser
from turnout.core.errors import ConfigError, Fault


def command(argv: list[str]) -> int:
    """Writes the files and says what to do next."""
    parser = Parser(
        prog="turnout new",
        description="Write a run to begin with: run.yaml with a comment at every option, functions to edit, data.",
    )
    parser.add_argument("folder", metavar="DIR", nargs="?", default=".", help="where to (default: here)")
    parser.add_argument(
        "--task",
        choices=tuple(SECTIONS),
        default="rl",
        help="a reward of your own (default); several turns; a program of OpenAI's client; answers to imitate",
    )
    asked = parser.parse_args(argv)
    folder = Path(os.path.expanduser(asked.folder))  # noqa: PTH111  pathlib's raises for an unknown user
    made = files(asked.task)
    write(folder, made)
    for name, text in made.items():
        print(f"{folder / name}  {text.count(chr(10))} lines")
    print("\nNext:")
    if folder.resolve() != Path.cwd():
        print(f"  cd {asked.folder}")
    print("  turnout train run.yaml --hf-checkpoint tiny:llama --num-rollout 3    does it run?")
    print("  turnout train run.yaml")
    return 0


def write(folder: Path, made: dict[str, str]) -> None:
    """Raises ConfigError where one of the files exists, or the folder takes none."""
    there = [name for name in made if (folder / name).exists()]
    if there:
        remedy = "give another folder: nothing is overwritten"
        raise ConfigError([Fault("DIR", str(folder / name), "exists already", remedy) for name in there])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in made.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        reason = f"can't be written: {error.strerror or type(error).__name__}"
        raise ConfigError(Fault("DIR", str(folder), reason, "give another folder")) from None
