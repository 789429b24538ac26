"""Adds checksums of rows, which SQLite files keep, and the clock at the newest transaction."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TABLES = (
    "device",
    "front",
    "node",
    "run",
    "round",
    "observation",
    "device_overrides",
    "budget_override",
    "reference",
    "reference_pin",
    "coordinator_term",
)


def upgrade() -> None:
    """Add the columns and the table; the rows' checksums are written after all migrations."""
    for table in _TABLES:
        op.add_column(table, sa.Column("checksum", _COUNT))
    op.create_table(
        "coordinator_clock",
        sa.Column("only", _COUNT, primary_key=True, autoincrement=False),
        sa.Column("noted_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("boot_id", sa.String(), nullable=False),
        sa.Column("since_boot_s", sa.Double(), nullable=False),
        sa.Column("jumped_at", sa.DateTime(timezone=True)),
        sa.Column("checksum", _COUNT),
    )
