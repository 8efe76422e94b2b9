"""Alembic's entry: migrates on the connection that `upgrade` passes, inside its transaction."""

from alembic import context

from longstraw_agents.storage.schema import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
context.run_migrations()
