"""Rounds that trained without a plan, while their Flower server could not reach the coordinator."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "unplanned_round",
        sa.Column("run_id", sa.String(), primary_key=True),
        sa.Column("number", _COUNT, primary_key=True, autoincrement=False),
        sa.Column("began_at", _TIME, nullable=False),
        sa.Column("ended_at", _TIME, nullable=False),
        sa.Column("wall_s", sa.Double(), nullable=False),
        sa.Column("results", sa.Text(), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("checksum", _COUNT),
    )
