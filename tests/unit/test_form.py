"""The form of the source: sizes, contracts, and no error that is swallowed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "turnout"
MODULES = sorted(SOURCE.rglob("*.py"))

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 70
MAX_PARAMETERS = 5
BROAD = {"Exception", "BaseException"}

# Places that may catch everything and go on: (module, function) -> why.
BROAD_ALLOWED = {
    ("dash/texts.py", "_load"): "tokenizers raises plain Exception; it is told in the place of the texts",
    ("observe/boards.py", "_try"): "W&B and files of TensorBoard: told once, and the board is left out",
    ("observe/panel.py", "_drawn"): "a fault of the picture must not end a run; it is shown in its place",
    (
        "placement/call_threads.py",
        "body",
    ): "handed to the caller, who would wait for ever for a thread that ended",
    (
        "engine/loop.py",
        "_main",
    ): "doesn't go on: ends the process, which must not live without its compute thread",
    (
        "engine/parallel_worker.py",
        "guarded",
    ): "ends the process: a rank must not go on without a thread of its own",
    ("rollout/rewards.py", "_in_part"): "whatever a user's function raises is an outcome, with its text",
    ("train/rank.py", "serve"): "the error travels to the controller, which decides what it means",
    ("train/rank.py", "work"): "on a thread: told to the controller when it asks whether the copy is written",
}


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    every = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return len([argument for argument in every if argument.arg not in ("self", "cls")])


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Catches everything, and does not end by raising."""
    caught = handler.type
    types = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    names = {node.id for node in types if isinstance(node, ast.Name)}
    return (caught is None or bool(names & BROAD)) and not isinstance(handler.body[-1], ast.Raise)


def suppresses_all(call: ast.Call) -> bool:
    named = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return named == "suppress" and any(isinstance(a, ast.Name) and a.id in BROAD for a in call.args)


def broad_places(tree: ast.Module) -> set[str]:
    """The innermost functions (or "module") in which everything is caught."""
    found: set[str] = set()

    def walk(node: ast.AST, inside: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = node.name
        if isinstance(node, ast.ExceptHandler) and is_broad(node):
            found.add(inside)
        if isinstance(node, ast.Call) and suppresses_all(node):
            found.add(inside)
        for child in ast.iter_child_nodes(node):
            walk(child, inside)

    walk(tree, "module")
    return found


def test_modules_are_short():
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_MODULE_LINES} == {}


def test_functions_are_short(trees):
    long = {
        f"{name}:{function.name}": lines
        for name, tree in trees.items()
        for function in functions(tree)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_functions_have_few_parameters(trees):
    many = {
        f"{name}:{function.name}": parameters(function)
        for name, tree in trees.items()
        for function in functions(tree)
        if parameters(function) > MAX_PARAMETERS
    }
    assert many == {}, "put them into a frozen dataclass"


def test_every_module_states_its_contract(trees):
    assert [name for name, tree in trees.items() if not ast.get_docstring(tree)] == []


def test_no_module_is_a_drawer():
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert [
        name for name in map(name_of, MODULES) if drawers & set(name.removesuffix(".py").split("/"))
    ] == []


def test_no_error_is_swallowed(trees):
    found = {(name, place) for name, tree in trees.items() for place in broad_places(tree)}
    assert found - set(BROAD_ALLOWED) == set(), "catch what can happen, or say here why everything is caught"
    assert set(BROAD_ALLOWED) - found == set(), "an allowance that nothing uses"


@pytest.mark.parametrize(
    ("source", "places"),
    [
        ("def f():\n    try: pass\n    except Exception: pass", {"f"}),
        ("def f():\n    try: pass\n    except: pass", {"f"}),
        ("def f():\n    try: pass\n    except (OSError, BaseException): return 1", {"f"}),
        ("try: pass\nexcept Exception: pass", {"module"}),
        ("def f():\n    with contextlib.suppress(Exception): pass", {"f"}),
        ("def f():\n    try: pass\n    except BaseException:\n        g()\n        raise", set()),
        ("def f():\n    try: pass\n    except OSError: pass", set()),
    ],
)
def test_the_search_for_broad_handlers_sees_them(source, places):
    assert broad_places(ast.parse(source)) == places
