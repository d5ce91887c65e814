"""A depot in an object store: s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix.

Owns the connection. Credentials, region and endpoint come from the environment, as the store's own tools read them
(AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...; obstore.store.from_url). Promises of turnout.weights.depot hold by the
store's own: a put shows whole or not at all, and one with If-None-Match (mode "create") has one winner. Each
request has a deadline and is tried again a few times; a create whose answer was lost is settled by reading back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from turnout.core.errors import WeightError

SCHEMES = ("s3://", "gs://", "az://")
REQUEST_DEADLINE_S, RETRIES, RETRY_DEADLINE_S = 30, 4, 120
CHUNK_BYTES = 8 << 20


def is_url(text: str) -> bool:
    """Whether this names an object store, and not a path."""
    return text.startswith(SCHEMES)


class ObjectDepot:
    """A Depot (turnout.weights.depot) that can also be uploaded to."""

    def __init__(self, url: str) -> None:
        """Raises WeightError for what is no URL of a store that is known here. Nothing is asked yet."""
        self.name = url.rstrip("/")
        plain = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", "")).startswith("http://")
        with self._told(""):
            self._store = from_url(
                self.name,
                client_options={"timeout": f"{REQUEST_DEADLINE_S}s", "allow_http": plain},
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_DEADLINE_S)},
            )

    def sizes(self, folder: str = "") -> dict[str, int]:
        with self._told(folder):
            listed = obstore.list(self._store, prefix=folder or None, chunk_size=1000)
            return dict(sorted((meta["path"], meta["size"]) for chunk in listed for meta in chunk))

    def read(self, key: str) -> bytes | None:
        with self._told(key):
            try:
                return bytes(obstore.get(self._store, key).bytes())
            except FileNotFoundError:
                return None

    def create_once(self, key: str, data: bytes) -> bool:
        with self._told(key):
            try:
                obstore.put(self._store, key, data, mode="create")
            except AlreadyExistsError:
                pass  # another's; or this very one, made by a try whose answer was lost
            except BaseError:
                found = self.read(key)
                if found is None:
                    raise
                return found == data
            else:
                return True
        return self.read(key) == data

    def put(self, key: str, data: bytes) -> None:
        with self._told(key):
            obstore.put(self._store, key, data)

    def put_file(self, key: str, source: Path) -> None:
        """A local file's content under a key that nobody else writes; in parts, where it is large."""
        with self._told(key):
            obstore.put(self._store, key, source)

    def fetch_file(self, key: str, target: Path) -> None:
        with self._told(key), target.open("wb") as file:
            for chunk in obstore.get(self._store, key).stream(min_chunk_size=CHUNK_BYTES):
                file.write(chunk)

    def delete(self, keys: Iterable[str]) -> None:
        """Removes keys one after another; what is gone already is no error."""
        for key in keys:
            with self._told(key):
                try:
                    obstore.delete(self._store, key)
                except FileNotFoundError:
                    continue

    @contextmanager
    def _told(self, key: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError, ValueError) as fault:
            what = str(fault).split("Debug source")[0].strip()
            raise WeightError(f"{self.name}/{key}: {what}") from fault
