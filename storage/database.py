"""Connections and transactions: what SQLite and PostgreSQL need so that a committed turn stays committed.

Idea: a write is one function of a connection, run in one transaction, and run again if the database says "later" (busy,
deadlock, restart). So it must find its own earlier success: every write of the store is idempotent. Errors of the drivers end
here and become ours.

SQLite runs in WAL mode with `synchronous=FULL`, set on every connection; writers begin IMMEDIATE. Pages of 16 KiB, because
blobs of some 2,500 bytes would leave a third of a 4 KiB page empty.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from longstraw_agents.errors import ConfigError, CorruptionError, LongStrawError, StoreError, StoreFullError

Result = TypeVar("Result")


@dataclass(frozen=True)
class StoreConfig:
    """How a store is used.

    retry_seconds: how long a write waits for a busy or restarting database before it gives up. quota_bytes: the most that the
    database may take; None for no quota. reserve_bytes: disk space that writes leave free (SQLite only). read_only: the database
    itself refuses every write of this process.
    """

    retry_seconds: float = 120.0
    quota_bytes: int | None = None
    reserve_bytes: int = 64 * 2**20
    read_only: bool = False

    def __post_init__(self) -> None:
        if self.retry_seconds < 0 or self.reserve_bytes < 0:
            raise ConfigError(f"retry_seconds and reserve_bytes must not be negative, got {self}")
        if self.quota_bytes is not None and self.quota_bytes < 1:
            raise ConfigError(f"quota_bytes must be at least 1, or None for no quota, got {self.quota_bytes}")


class Database:
    """One engine, with `read` and `write`. Thread-safe."""

    def __init__(self, url: str, config: StoreConfig, *, create: bool) -> None:
        self.url = url if "://" in url else f"sqlite:///{Path(url).absolute()}"
        self.config = config
        try:
            parsed = make_url(self.url)
            if parsed.drivername == "postgresql":
                parsed = parsed.set(drivername="postgresql+psycopg")
            self.sqlite = parsed.get_backend_name() == "sqlite"
            self.path = Path(parsed.database) if self.sqlite and parsed.database not in (None, "", ":memory:") else None
            if self.sqlite and self.path is None:
                raise StoreError(f"a store needs a file, got {url!r}; give a path")
            self._prepare_path(create)
            self.engine: Engine = create_engine(parsed, connect_args=_connect_args(self.sqlite, config.read_only))
        except (SQLAlchemyError, NoSuchModuleError, ModuleNotFoundError) as error:
            raise StoreError(
                f"cannot use the store {url!r}: {error}; give a path, sqlite:///PATH, or postgresql://USER@HOST/NAME "
                "(pip install 'longstraw-agents[postgresql]')"
            ) from None
        self._writer = threading.Lock()
        if self.sqlite:
            event.listen(self.engine, "connect", _on_connect)
            event.listen(self.engine, "begin", _on_begin)
            if config.read_only:
                event.listen(self.engine, "connect", lambda connection, record: connection.execute("PRAGMA query_only=ON"))

    def _prepare_path(self, create: bool) -> None:
        if self.path is None:
            return
        if not create and not self.path.exists():
            raise StoreError(f"there is no store at {self.path}; give the path of one, or create it")
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Returns all connections; SQLite then folds its write-ahead log into the file."""
        self.engine.dispose()

    def read(self, action: Callable[[Connection], Result]) -> Result:
        """Runs `action` in one transaction that sees one state of the store.

        A stored value that `action` cannot make sense of is damage: CorruptionError.
        """

        def attempt() -> Result:
            with self.engine.connect() as connection:
                if not self.sqlite:
                    connection = connection.execution_options(isolation_level="REPEATABLE READ")
                with connection.begin():
                    return action(connection)

        try:
            return self._retried(attempt)
        except LongStrawError:
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, MemoryError) as error:
            what = f"a stored row cannot be read ({error!r})"
            raise CorruptionError(f"{what}; `longstraw db check` lists what is affected") from error

    def write(self, action: Callable[[Connection], Result], *, frees: bool = False) -> Result:
        """Runs `action` in one transaction and commits it durably, or raises and leaves nothing.

        `frees`: the action deletes, so it may use what is kept in reserve.
        `action` may run several times, after a commit whose outcome is unknown too; it must find its own success.
        Raises StoreFullError, CorruptionError, StoreError, and what `action` raises.
        """

        def attempt() -> Result:
            with self.engine.connect().execution_options(longstraw_write=True) as connection, connection.begin():
                if not frees:
                    self._check_space(connection)
                return action(connection)

        if not self.sqlite:
            return self._retried(attempt)
        with self._writer:  # SQLite has one writer: threads queue here rather than poll its lock
            return self._retried(attempt)

    def size(self, connection: Connection) -> int:
        """Bytes that the database takes on disk."""
        if self.path is not None:
            files = [self.path, self.path.with_name(self.path.name + "-wal")]
            return sum(file.stat().st_size for file in files if file.exists())
        return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())

    def compact(self) -> None:
        """Gives space that deletions left back to the file system; takes as much room again while it runs."""
        with self.engine.connect() as connection:
            autocommit = connection.execution_options(isolation_level="AUTOCOMMIT") if not self.sqlite else connection
            raw = autocommit.connection.driver_connection
            if raw is None:
                raise StoreError("the connection to the store was lost; try again")
            raw.execute("VACUUM" if self.sqlite else "VACUUM FULL")

    def _check_space(self, connection: Connection) -> None:
        """Refuses a write that would leave too little room."""
        quota = self.config.quota_bytes
        if quota is not None and (size := self.size(connection)) >= quota:
            raise StoreFullError(
                f"the store takes {size} bytes, its quota is {quota}; "
                "delete runs and `longstraw db gc --compact`, or raise the quota"
            )
        if self.path is not None and self.config.reserve_bytes:
            free = shutil.disk_usage(self.path.parent).free
            if free < self.config.reserve_bytes:
                raise StoreFullError(
                    f"{free} bytes are free beside {self.path}, {self.config.reserve_bytes} are kept in reserve; free some"
                )

    def _retried(self, attempt: Callable[[], Result]) -> Result:
        deadline = time.monotonic() + self.config.retry_seconds
        pause, lost_races = 0.005, 0
        while True:
            try:
                return attempt()
            except LongStrawError:
                raise
            except (SQLAlchemyError, sqlite3.Error) as error:
                lost_races += isinstance(error, IntegrityError)
                if not _is_transient(error) or lost_races > 20 or time.monotonic() > deadline:
                    raise translated(error) from error
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, 1.0)


def translated(error: Exception) -> LongStrawError:
    """Our error for a driver's."""
    cause = getattr(error, "orig", None) or error
    name, state = getattr(cause, "sqlite_errorname", None), getattr(cause, "sqlstate", None)
    message = f"{type(cause).__name__}: {cause}".strip()
    shared = ("SQLITE_IOERR_SHMOPEN", "SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_SHMMAP")  # no room for the log's index
    if name in ("SQLITE_FULL", *shared) or state in ("53100", "53200") or "No space left" in message:
        return StoreFullError(f"the disk of the store is full ({message}); the failed write left nothing. Free some space")
    if name in ("SQLITE_CORRUPT", "SQLITE_NOTADB") or (name or "").startswith("SQLITE_CORRUPT") or (state or "").startswith("XX"):
        return CorruptionError(f"the store's file is damaged ({message}); `longstraw db check` lists what is affected")
    return StoreError(f"the store could not do it ({message})")


def _is_transient(error: Exception) -> bool:
    """True for faults that pass: locks, deadlocks, lost races, lost connections, a server that restarts."""
    if isinstance(error, PoolTimeout):
        return True
    cause = getattr(error, "orig", None) or error
    name, state = getattr(cause, "sqlite_errorname", None) or "", getattr(cause, "sqlstate", None) or ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")):
        return True
    if isinstance(error, IntegrityError):  # another writer was first with the same branch, turn or task
        return name.startswith(("SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY")) or state == "23505"
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    if state in ("40001", "40P01", "55P03", "57P01", "57P02", "57P03", "53300") or state.startswith("08"):
        return True
    return not state and not name and type(cause).__module__.startswith("psycopg") and "connect" in str(cause).lower()


def _connect_args(sqlite: bool, read_only: bool) -> dict[str, Any]:
    if sqlite:
        return {"timeout": 60}
    return {"options": "-c default_transaction_read_only=on"} if read_only else {}


def _on_connect(connection: sqlite3.Connection, record: Any) -> None:
    """Settings that SQLite keeps per connection, and WAL, which it keeps in the file."""
    connection.isolation_level = None  # we begin transactions ourselves: the driver would begin them late
    connection.execute("PRAGMA page_size=16384")  # of a file that does not exist yet
    deadline = time.monotonic() + 60
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:  # the change of mode does not wait for other connections by itself
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    for setting in ("synchronous=FULL", "foreign_keys=ON", "cache_size=-4000", "cell_size_check=ON", "temp_store=MEMORY"):
        connection.execute(f"PRAGMA {setting}")


def _on_begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("longstraw_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
