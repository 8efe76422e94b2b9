"""Sealed rows: writing a row with the digest of its values, and noticing on reading that it is not what was written.

Idea: a seal covers the row's key too, and whoever asks for rows knows the values that they must have and how many there are. So a
flipped bit is noticed in a row, and just as well in what leads to it: an index, a page's pointer, the definition of a table.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from typing import Any

from sqlalchemy import Connection, Select, Table, bindparam, insert, select, update

from longstraw_agents.errors import CorruptionError
from longstraw_agents.storage.blobs import seal
from longstraw_agents.storage.schema import canonical

Row = dict[str, Any]

#: Rows that are many: seals of 4 bytes, where 16 would be a hundredth of the store. One fault in 2**32 fits by chance.
_MANY = ("turns", "spans")
#: Columns that came after rows had been sealed: they are sealed where they hold something, so that old seals still fit.
_LATER = {"turns": ("notes",)}


def nonce() -> bytes:
    """Bytes that name one write."""
    return secrets.token_bytes(8)


def seal_of(table: Table, row: Mapping[str, Any]) -> bytes:
    """The seal that belongs to `row`, a value for each column of `table`."""
    later = _LATER.get(table.name, ())
    values = {name: row[name] for name in _names(table) if name not in later or row[name] is not None}
    if table.name in _MANY:  # without JSON: a tree of long trajectories reads tens of thousands of rows
        plain = [canonical(value) if isinstance(value, dict) else value for value in values.values()]
        return blake2b(f"{table.name}\0{plain!r}".encode(), digest_size=4).digest()
    return seal(table.name, {name: v.hex() if isinstance(v, bytes) else v for name, v in values.items()})


@cache
def _names(table: Table) -> tuple[str, ...]:
    """The columns that a seal covers, in the table's order."""
    return tuple(name for name in table.columns.keys() if name != "seal")


def intact(table: Table, row: Mapping[str, Any]) -> bool:
    """Whether the row's seal fits."""
    try:
        return bool(row["seal"] == seal_of(table, row))
    except (TypeError, ValueError):  # a damaged value of another type than its column's
        return False


def checked(table: Table, row: Mapping[str, Any], **values: Any) -> Row:
    """`row` as a dict. Raises CorruptionError if its seal does not fit, or if it has other values than it was asked for."""
    row = dict(row)
    if not intact(table, row) or (values and any(row[name] != value for name, value in values.items())):
        key = row.get("id", {name: row[name] for name in table.primary_key.columns.keys() if name in row})
        raise CorruptionError(f"the row {key} of table {table.name} does not fit its seal; restore it from a copy")
    return row


def fetch(connection: Connection, table: Table, *, lock: bool = False, **values: Any) -> Row | None:
    """The one row with these values, checked; None if there is none. `lock` keeps other writers from it (PostgreSQL)."""
    found = connection.execute(_query(table, tuple(values), lock), values).mappings().one_or_none()
    return None if found is None else checked(table, found, **values)


def fetch_all(connection: Connection, table: Table, count: int, **values: Any) -> list[Row]:
    """The rows with these values, checked, by primary key. Raises CorruptionError unless there are `count` of them."""
    rows = [checked(table, row, **values) for row in connection.execute(_query(table, tuple(values), False), values).mappings()]
    different = len({tuple(row[name] for name in table.primary_key.columns.keys()) for row in rows})
    if not count == len(rows) == different:
        raise CorruptionError(
            f"table {table.name} holds {different} different rows with {values or 'any values'} where {count} were written; "
            "restore the store from a copy"
        )
    return rows


@cache
def _query(table: Table, names: tuple[str, ...], lock: bool) -> Select[Any]:
    """The rows whose columns have given values, by primary key; made once, since that costs more than running it."""
    query = select(table).where(*(table.c[name] == bindparam(name) for name in names)).order_by(*table.primary_key.columns)
    return query.with_for_update(key_share=True) if lock else query


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
