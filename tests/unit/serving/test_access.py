"""Keys: each call takes its own, and none is ever shown."""

from __future__ import annotations

import pytest

from turnout.core.errors import ConfigError
from turnout.serving.access import OPEN, Access, authorities


@pytest.mark.parametrize(
    ("access", "ordinary", "control"),
    [
        (OPEN, None, None),
        (Access("a"), "a", "a"),
        (Access(None, "b"), "b", "b"),
        (Access("a", "b"), "a", "b"),
    ],
)
def test_each_call_shows_its_key(access: Access, ordinary: str | None, control: str | None) -> None:
    def shown(path: str) -> str | None:
        return access.headers(path).get("Authorization", "Bearer ").removeprefix("Bearer ") or None

    assert shown("/generate") == shown("/server_info") == ordinary
    assert shown("/update_weights_from_disk") == shown("/weights_checker") == control


def test_no_key_is_printed() -> None:
    assert "sesame" not in f"{Access('sesame', 'sesame')} {Access('sesame', 'sesame')!r}"


def test_a_file_that_is_no_certificate_names_its_flag(tmp_path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for file in ("ca.pem", "none.pem"):
        with pytest.raises(ConfigError, match="--rollout-engine-ca-file"):
            authorities(tmp_path / file, "--rollout-engine-ca-file")
