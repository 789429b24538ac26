"""Adds names and labels of runs, and the events of the fleet."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

_COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the columns and the table; the name of an existing run is its id."""
    op.add_column("run", sa.Column("name", sa.String(), nullable=False, server_default=""))
    op.add_column("run", sa.Column("labels", sa.Text(), nullable=False, server_default="{}"))
    op.execute("UPDATE run SET name = run_id")
    op.create_table(
        "event",
        sa.Column("order", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("event_id", sa.String(), nullable=False, unique=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.Column("needs_attention", sa.Boolean(), nullable=False),
        sa.Column("device_id", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("round", _COUNT, nullable=False),
        sa.Column("supply", sa.String(), nullable=False),
        sa.Column("caller", sa.String(), nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_index("ix_event_at", "event", ["at"])
    op.create_index("ix_event_device_id", "event", ["device_id"])
