"""Hooks of the documentation's site: the READMEs are its first pages, and files outside docs/ that pages link to
come along under `files/`. Links are written for the repository and mean the same here."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
PAGES = {"README.md": "index.md", "README.zh.md": "index.zh.md"}  # in the repository -> in the site
LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^)\s#]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages that `nav` leaves out under a heading of their own, so that none is lost."""
    docs = Path(config.docs_dir)
    named = set(re.findall(r"[\w./-]+\.md", str(config.nav)))
    more = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    if config.nav and (left := [page for page in more if page not in named]):
        config.nav.append({"More": left})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the READMEs, and each file that a page links to outside docs/."""
    for source, page in PAGES.items():
        files.append(
            File.generated(config, page, content=rewritten(source, (ROOT / source).read_text("utf-8")))
        )
    sources = [
        *PAGES,
        *(
            f"docs/{file.src_uri}"
            for file in files.documentation_pages()
            if file.src_uri not in PAGES.values()
        ),
    ]
    for source in sources:
        for _, target in LINK.findall((ROOT / source).read_text("utf-8")):
            path = resolved(source, target)
            place = placed(path)
            if place.startswith("files/") and (ROOT / path).is_file() and place not in files.src_uris:
                files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links outside docs/ turned to where these files are in the site."""
    del config, files
    return (
        markdown if page.file.src_uri in PAGES.values() else rewritten(f"docs/{page.file.src_uri}", markdown)
    )


def resolved(source: str, target: str) -> str:
    """The path in the repository that a link of the file `source` names."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def placed(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"


def rewritten(source: str, markdown: str) -> str:
    """The text of the file `source` with links as they are in the site."""
    start = posixpath.dirname(placed(source)) or "."
    return LINK.sub(
        lambda found: found[1] + posixpath.relpath(placed(resolved(source, found[2])), start), markdown
    )
