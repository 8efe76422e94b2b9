"""Notes of a turn: how it was made, where that was not the plain case (`types.Turn.notes`)."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("turns", sa.Column("notes", sa.Text, nullable=True))
