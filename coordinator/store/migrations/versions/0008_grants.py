"""Trainings that were given up and may go on, and the longest lifetime of a grant that a device may rely on."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the tables."""
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
