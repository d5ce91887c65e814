"""The pages of README and docs/: links and anchors lead somewhere, code in them is whole, all are in the site."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.doc_commands import FENCE, ROOT, SHELL, commands_of, pages
from turnout.cli.main import COMMANDS
from turnout.config import load

PAGES = pages()
LANGUAGES = {"", *SHELL, "text", "json", "yaml", "python"}
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
INLINE = re.compile(r"`turnout ([a-z]+)[^`]*`")
READMES = {"index.md": "README.md", "index.zh.md": "README.zh.md"}


def prose(path: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for link in LINK.findall(prose(path)):
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.is_file() or not target.is_relative_to(ROOT):
            broken.append(link)
        elif anchor and anchor not in anchors(target):
            broken.append(f"{link}: has {sorted(anchors(target))}")
    assert broken == []


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_blocks_are_of_a_known_language_and_whole(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n```") % 2 == 0
    for language, body in FENCE.findall(text):
        assert language in LANGUAGES, f"another language of the block that begins {body[:40]!r}"
        if language == "python":
            compile(body, path.name, "exec", dont_inherit=True)
        elif language == "yaml":
            yaml.safe_load(body)
    commands_of(path)
    hidden = re.findall(r"^ {4}(?:turnout|python -m|pip|make) .*$", prose(path), re.MULTILINE)
    assert hidden == [], "put commands into a block of ```sh"


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_lists_and_tables_stand_apart(path: Path) -> None:
    """Without an empty line before it, the site shows a list or a table as running text."""
    glued, before = [], ""
    for line in prose(path).splitlines():
        begins = re.match(r"(- |\d+\. |\|)", line)
        if begins and before.strip() and not re.match(r"(\s*(- |\d+\. )|\|| {2})", before):
            glued.append(line[:60])
        before = line
    assert glued == []


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_commands_in_the_text_exist(path: Path) -> None:
    assert [name for name in INLINE.findall(prose(path)) if name not in COMMANDS] == []


@pytest.mark.parametrize(
    "path", [path for path in PAGES if path.stem not in ("status", "decisions")], ids=lambda path: path.stem
)
def test_files_named_in_the_text_exist(path: Path) -> None:
    """Paths of the source without `src/turnout`, of anything else from the repository's root."""
    named = re.findall(r"`((?:\w+/)+\w+\.(?:py|c|yaml))`", prose(path))
    places = (ROOT, ROOT / "src" / "turnout", ROOT / "src")
    missing = [name for name in named if not any((place / name).is_file() for place in places)]
    assert [name for name in missing if not name.startswith("path/to/")] == []
    source = ROOT / "src"
    for name in re.findall(r"`(turnout(?:\.\w+)+)`", prose(path)):
        place = source.joinpath(*name.split("."))
        outer = place.parent.with_suffix(".py")  # the last word may be something in a module
        inside = outer.is_file() and re.search(rf"\b{place.name}\b", outer.read_text("utf-8"))
        assert place.is_dir() or place.with_suffix(".py").is_file() or inside, name


def test_the_architecture_names_all_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert f"`{' > '.join(layers)}`" in " ".join(page.split())
    table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE)
    packages = {name for layer in layers for name in layer.split(" | ")}
    assert packages <= set(re.findall(r"`(\w+)`", " ".join(table)))


def test_the_configuration_of_the_readme_is_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [
        body
        for language, body in FENCE.findall((ROOT / "README.md").read_text("utf-8"))
        if language == "yaml"
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_prompts.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    (tmp_path / "my_reward.py").write_text("def reward(prompt, response, label, **metadata): return 0.0\n")
    for at, block in enumerate(blocks):
        (tmp_path / f"{at}.yaml").write_text(block)
        load(tmp_path / f"{at}.yaml")
    assert blocks


def test_both_readmes_have_the_same_blocks() -> None:
    """Text is translated, commands are not; comments in them may be."""

    def blocks(name: str) -> list[list[str]]:
        found = FENCE.findall((ROOT / name).read_text("utf-8"))
        return [[re.sub(r"\s+#.*", "", line) for line in body.splitlines()] for _, body in found]

    assert blocks("README.zh.md") == blocks("README.md")
    targets = [
        sorted(set(LINK.findall(prose(ROOT / name))) - {"README.md", "README.zh.md"})
        for name in READMES.values()
    ]
    assert targets[0] == targets[1], "both link to the same pages"
