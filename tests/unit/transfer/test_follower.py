"""A follower in a world of its own: what it takes, what it refuses, and that no kill or fault leaves a mix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.follower_world import World, make_store
from tests.published import bits_of


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    root = tmp_path_factory.mktemp("store") / "weights"
    return root, make_store(root)


def test_it_follows_to_the_newest_version(store, tmp_path: Path) -> None:
    world = World(*store, tmp_path / "host", 0)
    for visible in (1, 2, 3, 6):
        world.life(visible)
        held, found = world.looked()
        assert (held, found) == (visible, bits_of(store[1][visible]))
        assert world.engine.tensors == bits_of(store[1][visible])
