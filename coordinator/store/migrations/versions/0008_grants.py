"""Adds trainings that may outlast their round, the longest lifetime of a grant, and since when a device is trusted."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the tables, and add the column."""
    op.add_column("device_overrides", sa.Column("trusted_after", sa.String(), nullable=False, server_default=""))
    op.create_table(
        "given_up_training",
        sa.Column("device_id", sa.String(), primary_key=True),
        sa.Column("plan_id", sa.String(), nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "grant_lifetime",
        sa.Column("only", _COUNT, primary_key=True, autoincrement=False),
        sa.Column("lifetime_s", sa.Double(), nullable=False),
        sa.Column("checksum", _COUNT),
    )
