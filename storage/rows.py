"""Sealed rows: writing a row with the digest of its values, and noticing on reading that a bit has flipped."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Table, insert, select, update

from longstraw_agents.errors import CorruptionError
from longstraw_agents.storage.blobs import seal

Row = dict[str, Any]


def nonce() -> bytes:
    """Bytes that name one write."""
    return secrets.token_bytes(8)


def seal_of(table: Table, row: Mapping[str, Any]) -> bytes:
    """The seal that belongs to `row`, a value for each column of `table`."""
    values = {c.name: row[c.name] for c in table.columns if c.name != "seal"}
    return seal(table.name, {name: v.hex() if isinstance(v, bytes) else v for name, v in values.items()})


def checked(table: Table, row: Mapping[str, Any]) -> Row:
    """`row` as a dict. Raises CorruptionError if its seal does not fit."""
    row = dict(row)
    try:
        intact = row["seal"] == seal_of(table, row)
    except (TypeError, ValueError):
        intact = False
    if not intact:
        key = row.get("id", {name: row[name] for name in table.primary_key.columns.keys() if name in row})
        raise CorruptionError(f"the row {key} of table {table.name} does not fit its seal; restore it from a copy")
    return row


def fetch(connection: Connection, table: Table, *where: Any, lock: bool = False) -> Row | None:
    """The one row that meets `where`, checked; None if there is none. `lock` keeps other writers from it (PostgreSQL)."""
    query = select(table).where(*where)
    row = connection.execute(query.with_for_update() if lock else query).mappings().one_or_none()
    return None if row is None else checked(table, row)


def insert_sealed(connection: Connection, table: Table, values: Mapping[str, Any]) -> Row:
    """Inserts a row whose `id` the database gives; returns it whole."""
    key = connection.execute(insert(table).values(**values, seal=b"").returning(table.c.id)).scalar_one()
    row: Row = {**values, "id": key}
    row["seal"] = seal_of(table, row)
    connection.execute(update(table).where(table.c.id == key).values(seal=row["seal"]))
    return row


def update_sealed(connection: Connection, table: Table, row: Row, **changes: Any) -> Row:
    """Changes columns of a checked `row`; returns the new row."""
    new = {**row, **changes}
    new["seal"] = seal_of(table, new)
    connection.execute(update(table).where(table.c.id == row["id"]).values(**changes, seal=new["seal"]))
    return new
