"""`turnout serve --model-path DIR|NAME ...`: the embedded engine in this process."""

from __future__ import annotations


def command(argv: list[str]) -> int:
    """Serves until SIGTERM or Ctrl-C; flags are those of `python -m turnout.engine`."""
    from turnout.engine.__main__ import main

    return main(["--detached", *_resolved(argv)])


def _resolved(argv: list[str]) -> list[str]:
    """A model may be given by name (smollm2-135m, tiny:llama), as for `turnout train`."""
    if "--model-path" not in argv[:-1]:
        return argv
    from turnout.train.model_zoo import resolve_checkpoint

    at = argv.index("--model-path") + 1
    return [*argv[:at], str(resolve_checkpoint(argv[at])), *argv[at + 1 :]]
