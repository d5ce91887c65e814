"""The tables of ledger.sqlite, their migrations, and how the file is opened.

Owns the file's format. Promises: a file that is torn, of another program, or of a newer Turnout is refused by name
and left as it is; an older one is brought to the present tables in one transaction. On a local disk the journal is
a write-ahead log, which readers can read beside; a commit is in the hands of the operating system, so it outlives
this process whenever that dies, and is synced by checkpoints (docs/guides/ledger.md). A network file system has no
shared memory for that log (https://sqlite.org/wal.html): there the file is opened in exclusive mode with a rollback
journal.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from turnout.core.errors import DataError, Fault

log = logging.getLogger(__name__)
APPLICATION_ID = 0x54726E74  # "Trnt", in the header of the file
BUSY_S = 2.0
LEAST_BYTES = 512
WAL_FORMAT = b"\2\2"  # bytes 18 and 19 of a file whose journal is a write-ahead log
WAL_PAGES = 16_000
START_ANEW = "resume from a checkpoint's copy, or start anew"
COPY = "its log can't be read from here: copy the directory to where you can write, or ask as the run's user"
REMEDIES = {  # where the file itself is not at fault
    sqlite3.SQLITE_READONLY: COPY,
    sqlite3.SQLITE_CANTOPEN: COPY,
    sqlite3.SQLITE_BUSY: "another process has it alone: ask again when that has ended",
    sqlite3.SQLITE_FULL: "free some space",
    sqlite3.SQLITE_IOERR: "look at the disk",
}
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs"})

# WITHOUT ROWID where rows are small: of one above a quarter of a page the rest would take a page of its own.
MIGRATIONS = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE owner (id INTEGER PRIMARY KEY CHECK (id = 1), incarnation INTEGER NOT NULL, host TEXT NOT NULL,
        pid INTEGER NOT NULL, expiry REAL NOT NULL);
    CREATE TABLE groups (group_id TEXT PRIMARY KEY, ordinal INTEGER NOT NULL, attempt INTEGER NOT NULL,
        prompt_id TEXT NOT NULL, state TEXT NOT NULL, admitted INTEGER NOT NULL, trained INTEGER, cause TEXT,
        moves INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE history (group_id TEXT NOT NULL, move INTEGER NOT NULL, event TEXT NOT NULL, state TEXT NOT NULL,
        step INTEGER, incarnation INTEGER NOT NULL, at REAL NOT NULL, cause TEXT,
        PRIMARY KEY (group_id, move)) WITHOUT ROWID;
    CREATE TABLE trajectories (group_id TEXT NOT NULL, member INTEGER NOT NULL, start INTEGER NOT NULL,
        tokens BLOB NOT NULL, logprobs BLOB NOT NULL, loss_mask BLOB NOT NULL, kv_mixed BLOB NOT NULL,
        versions TEXT NOT NULL, engines TEXT NOT NULL, finish TEXT NOT NULL, reward REAL, seed INTEGER NOT NULL,
        text TEXT NOT NULL, UNIQUE (group_id, member, start));
    CREATE TABLE forgotten (group_id TEXT PRIMARY KEY, members TEXT NOT NULL);
    CREATE TABLE batches (step INTEGER NOT NULL, incarnation INTEGER NOT NULL, group_ids TEXT NOT NULL,
        PRIMARY KEY (step, incarnation));
    CREATE TABLE versions (label TEXT PRIMARY KEY, incarnation INTEGER NOT NULL, counter INTEGER NOT NULL,
        root TEXT NOT NULL, step INTEGER NOT NULL, state TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
    CREATE TABLE checkpoints (step INTEGER NOT NULL, incarnation INTEGER NOT NULL, version TEXT NOT NULL,
        at REAL NOT NULL, PRIMARY KEY (step, incarnation)) WITHOUT ROWID;
    """,
    "ALTER TABLE trajectories ADD COLUMN routed BLOB NOT NULL DEFAULT x''",
)


@dataclass(frozen=True)
class Database:
    """An open ledger file, with the present tables. `path` None: in memory. `exclusive`: nobody else can read."""

    connection: sqlite3.Connection
    path: Path | None
    exclusive: bool = False

    def close(self) -> None:
        self.connection.close()


def open_database(path: Path | None) -> Database:
    """Opens a ledger to write, making it where there is none; None: one in memory. Raises DataError."""
    if path is None:
        database = Database(sqlite3.connect(":memory:", isolation_level=None), None)
        _migrate(database.connection, ":memory:")
        return database
    kind = file_system(path.parent)
    exclusive = kind in NETWORK or kind.startswith("fuse")
    if exclusive:
        log.info("%s lies on a network file system (%s): exclusive mode, rollback journal", path, kind)
    connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S, cached_statements=256)
    with _closed_if_refused(connection, path):
        _check_kind(connection, path)
        fault = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if fault != "ok":
            raise _refused(path, f"is torn: {fault}")
        mode, locking = ("DELETE", "EXCLUSIVE") if exclusive else ("WAL", "NORMAL")
        connection.execute(f"PRAGMA locking_mode = {locking}")
        connection.execute(f"PRAGMA journal_mode = {mode}")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        _migrate(connection, str(path))
    return Database(connection, path, exclusive)


def write_empty(path: Path) -> None:
    """An empty ledger in a new file, for rows of another one."""
    path.write_bytes(_empty())


@cache
def _empty() -> bytes:
    database = open_database(None)
    try:
        return database.connection.serialize()
    finally:
        database.close()


def read_database(path: Path) -> Database:
    """Opens a ledger to read only, also beside its writer. Raises DataError.

    One that no process has open is read without a file beside it, and taken to stay as it is: whoever keeps the
    connection compares `state_of`."""
    if not path.is_file():
        raise _refused(path, "there is no such file", "name the directory of a run")
    how = "immutable=1" if _at_rest(path) else "mode=ro"
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, timeout=BUSY_S)
    with _closed_if_refused(connection, path):
        _check_kind(connection, path)
        version = _version(connection)
        if version != len(MIGRATIONS):
            raise _wrong_version(path, version)
    return Database(connection, path)


def state_of(path: Path) -> tuple[int, ...]:
    """Equal as long as a connection of read_database may be kept. Raises OSError where there is no file."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns if _at_rest(path) else 0


def _at_rest(path: Path) -> bool:
    """Whether all of the file's write-ahead log is in it. Then nobody has it open: who does keeps a file -shm,
    which a reader would make as well, and leave there."""
    path = path.resolve()  # of a link they lie beside what it points to
    log = path.with_name(f"{path.name}-wal")
    try:
        with path.open("rb") as file:
            form = file.read(20)[18:]
        empty = not log.exists() or log.stat().st_size == 0
        return form == WAL_FORMAT and empty and not path.with_name(f"{path.name}-shm").exists()
    except OSError:
        return False  # SQLite says why


@contextmanager
def _closed_if_refused(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """A file that is no good is told as a DataError, with its connection closed."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        connection.close()
        remedy = REMEDIES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, START_ANEW)
        raise _refused(path, f"can't be read: {error}", remedy) from None
    except DataError:
        connection.close()
        raise


def file_system(folder: Path) -> str:
    """The type of the file system that a folder lies on, as Linux names it; empty where that isn't told."""
    mounts = Path("/proc/self/mounts")
    if not mounts.is_file():
        return ""
    place, found = folder.absolute().resolve(), (-1, "")
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        _, mount, kind, *_ = line.split(" ")
        target = Path(mount.replace("\\040", " "))
        if place.is_relative_to(target):  # the last of equal mounts lies on top
            found = max(found, (len(target.parts), kind), key=lambda pair: pair[0])
    return found[1]


def _check_kind(connection: sqlite3.Connection, path: Path) -> None:
    """Raises DataError for a file that is neither empty nor a ledger."""
    if 0 < path.stat().st_size < LEAST_BYTES:  # SQLite would take it for a new file
        raise _refused(path, "is torn: shorter than the header of an SQLite file")
    kind = int(connection.execute("PRAGMA application_id").fetchone()[0])
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if kind == 0 and empty:
        return
    if kind != APPLICATION_ID:
        raise _refused(path, "is an SQLite file, but not a ledger")


def _version(connection: sqlite3.Connection) -> int:
    """How many migrations the file has seen."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        return 0
    return int(connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()[0])


def _migrate(connection: sqlite3.Connection, path: str) -> None:
    version = _version(connection)
    if version > len(MIGRATIONS):
        raise _wrong_version(Path(path), version)
    if version == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        for script in MIGRATIONS[version:]:
            for statement in filter(str.strip, script.split(";")):
                connection.execute(statement)
        connection.execute(
            "INSERT OR REPLACE INTO meta VALUES ('schema_version', ?)", (str(len(MIGRATIONS)),)
        )
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _wrong_version(path: Path, version: int) -> DataError:
    if version > len(MIGRATIONS):
        return _refused(path, f"has schema version {version}, this Turnout knows {len(MIGRATIONS)}", "update")
    return _refused(path, f"has schema version {version} of {len(MIGRATIONS)}", "resume the run: it migrates")


def _refused(path: Path, reason: str, remedy: str = START_ANEW) -> DataError:
    return DataError(Fault("ledger", str(path), reason, remedy))
