"""No folder of a virtual disk outlives its worlds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from turnout.sim import folders


def test_what_killed_worlds_left_goes_with_their_folder_or_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    (tmp_path / f"{folders.PREFIX}all-{gone.pid}" / "0").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), folders.folder_of_worlds() as folder:
        assert list(tmp_path.iterdir()) == [folder]
        (folder / "0").mkdir()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
