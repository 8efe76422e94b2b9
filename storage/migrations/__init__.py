"""The schema's revisions and how a store is brought to the newest one.

Revisions are four digits, ascending, without branches. Each one runs in one transaction on either database, so a killed
migration leaves the store as it was. Alembic is imported only here: opening a store of the current schema does not load it.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from longstraw_agents.errors import SchemaError
from longstraw_agents.storage.schema import REVISION


def revision_of(connection: Connection) -> str | None:
    """The store's revision; None for an empty database. Raises SchemaError for a database that is not a store."""
    tables = set(inspect(connection).get_table_names())
    if "alembic_version" not in tables:
        if tables:
            raise SchemaError(
                f"this database holds other tables ({', '.join(sorted(tables)[:5])}) and no store; give an empty one, or another"
            )
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def require_current(revision: str | None) -> None:
    """Raises SchemaError unless `revision` is the one that this code reads and writes."""
    if revision == REVISION:
        return
    if revision is not None and revision.isdecimal() and revision < REVISION:
        raise SchemaError(f"the store has schema {revision}, this version needs {REVISION}; run `longstraw db upgrade URL`")
    raise SchemaError(
        f"the store has schema {revision}, this version knows up to {REVISION}; install a newer longstraw-agents"
    )


def upgrade(connection: Connection, revision: str = REVISION) -> None:
    """Brings the store forward to `revision` within the caller's transaction; nothing to do is no error."""
    from alembic import command
    from alembic.config import Config

    current = revision_of(connection)
    if current is not None and (not current.isdecimal() or current > REVISION):
        require_current(current)
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
