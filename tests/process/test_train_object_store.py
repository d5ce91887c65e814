"""`turnout train` with its versions in an object store: a real S3 server over HTTP, read back by a reader that has
nothing but the URL; and a hook that is called before each version is published."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.followed import FollowerProcess
from tests.object_store import environment, s3_server
from tests.process.run_process import of_kind, train
from turnout.weights.catalog import StoreReader
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of
from turnout.weights.object_depot import ObjectDepot
from turnout.weights.verify import verify

SHORT = ("--trainer-threads", "1", "--num-rollout", "3", "--no-plots", "--skip-eval-before-train",
         "--eval-num-prompts", "2", "--rollout-num-engines", "1")  # fmt: skip
HOOK = """
def note(folder):
    assert (folder / "DONE").is_file()
    with open({place!r}, "a") as file:
        file.write(folder.name + "\\n")

def read(folder):
    with open({place!r}, "a") as file:
        file.write("read " + folder.name + "\\n")
"""


def test_versions_lie_in_the_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "s3://weights/runs/tiny"
    hook, noted = tmp_path / "hook.py", tmp_path / "noted"
    hook.write_text(HOOK.format(place=str(noted)))
    with s3_server() as endpoint:
        words = ("--update-weight-disk-dir", url, "--custom-update-weight-post-write-path", f"{hook}:note",
                 "--custom-update-weight-pre-read-path", f"{hook}:read")  # fmt: skip
        status, _, err = train(tmp_path / "run", *SHORT, *words, **environment(endpoint))
        assert status == 0, err
        for name, value in environment(endpoint).items():
            monkeypatch.setenv(name, value)
        reader = StoreReader(ObjectDepot(url))
        found = reader.look()
        published = of_kind(tmp_path / "run", "VersionPublished")
        assert [(v.counter, v.root) for v in found.records.values()] == [
            (row["counter"], row["root"]) for row in published
        ]
        assert [m.version.counter for m in found.usable()] == [2, 3], "retention works there as well"
        for manifest in found.usable():
            assert verify(reader.fetch(manifest, tmp_path / "back" / manifest.directory)) == manifest
        followed = FollowerProcess(url, tmp_path / "host", "--once").ended()
        assert followed[0] == 0, followed
        assert root_of(read_checkpoint(tmp_path / "host")) == published[-1]["root"]
        assert reader.look().followers["host"]["counter"] == 3
        folders = [f"weight_v{n:06d}" for n in (1, 2, 3)]
        lines = [line for folder in folders for line in (folder, f"read {folder}")]
        assert noted.read_text().splitlines() == lines
        status, _, err = train(tmp_path / "second", *SHORT, *words[:2], **environment(endpoint))
        assert status == 5 and "belongs to run" in err
