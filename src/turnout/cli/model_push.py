"""`turnout model push RUN_DIR REPO`: a run's weights as a model of the hub, with a card of the run's facts.

Promises: what goes up is an ordinary checkpoint of one version, in one commit; the card says nothing that the run's
files don't; with `--private` nothing goes to a public repository; `--dry-run` asks nobody. The hub's key is that of
huggingface_hub (HF_TOKEN, or `hf auth login`), and never shown.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.core.errors import DataError, Fault, ModelError

if TYPE_CHECKING:
    from turnout.core.version import WeightVersion

OURS = ("DONE", "manifest.json")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Pushed:
    """What goes up: a folder with the files of these names, and a card beside them."""

    folder: Path
    names: tuple[str, ...]
    card: str
    version: WeightVersion


def push(run: Path, repo: str, counter: int | None, private: bool, api: Any = None) -> str:
    """Uploads a version of a run (None: its last); the URL. Raises UserError for a run or a repository that can't
    be, ModelError for what the hub refuses."""
    from httpx import HTTPError
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    check_repo(repo)
    api = HfApi(library_name="turnout") if api is None else api
    with tempfile.TemporaryDirectory(prefix="turnout-push-") as scratch:
        what = prepared(run, counter, Path(scratch))
        files = [CommitOperationAdd(name, str(what.folder / name)) for name in what.names]
        card = CommitOperationAdd("README.md", what.card.encode())
        message = f"{what.version.label} of a Turnout run"
        try:
            url = api.create_repo(repo, private=private, exist_ok=True)
            if private and not api.repo_info(repo).private:
                reason = "it is there already, and public: --private does not change that"
                raise ModelError(Fault("repository", repo, reason, "make it private there, or name another"))
            api.create_commit(repo, [*files, card], commit_message=message)
        except (HfHubHTTPError, HTTPError, OSError, ValueError) as fault:
            reason = f"the hub does not take it: {str(fault).splitlines()[0] if str(fault) else repr(fault)}"
            remedy = "log in with `hf auth login`, or set HF_TOKEN to a key that may write there"
            raise ModelError(Fault("repository", repo, reason, remedy)) from fault
    return str(url)


def prepared(run: Path, counter: int | None, scratch: Path) -> Pushed:
    """What `push` would upload; files that must be made first are made in `scratch`."""
    from turnout.observe.model_card import model_card
    from turnout.placement.real import DiskStore
    from turnout.train.model_zoo import resolve_checkpoint
    from turnout.weights.catalog import StoreReader
    from turnout.weights.depot import FolderDepot
    from turnout.weights.whole import whole_checkpoint

    config, summary = _read(run / "config.json"), _read(run / "summary.json")
    given = config.get("update_weight_disk_dir")
    if given is not None and "://" in given:
        reason, remedy = f"its versions lie in {given}", "copy them to a folder: turnout weights follow"
        raise DataError(Fault("run", str(run), reason, remedy))
    store = run / "weights" if given is None else Path(given).expanduser()
    files = DiskStore()
    if counter is None:
        usable = StoreReader(FolderDepot(store, files)).look().usable()
        if not usable:
            raise DataError(Fault("run", str(run), f"{store} holds no version", "let it publish one"))
        counter = max(manifest.version.counter for manifest in usable)
    base = resolve_checkpoint(config["hf_checkpoint"])
    version, folder = whole_checkpoint(store, files, counter, base, scratch / "checkpoint")
    names = tuple(sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in OURS))
    local = Path(config["hf_checkpoint"]).expanduser().is_dir()
    return Pushed(folder, names, model_card(config, summary, version.label, local), version)


def check_repo(repo: str) -> None:
    """Raises DataError for what can't be a repository."""
    if not _REPO.fullmatch(repo):
        raise DataError(Fault("repository", repo, "is no name of one", "write OWNER/NAME"))


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        reason = f"cannot be read: {fault}"
        raise DataError(
            Fault("run", str(path), reason, "give the directory of a run that has ended")
        ) from fault
