"""Adds how Flower's nodes are paired with their devices, and when each node named its device."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the columns; existing nodes count as not checked."""
    op.add_column("node", sa.Column("pairing_problem", sa.String()))
    op.add_column("node", sa.Column("bound_at", sa.DateTime(timezone=True)))
