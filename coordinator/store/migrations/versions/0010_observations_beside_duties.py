"""Adds whether each training was observed beside a duty."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add the column; existing trainings count as observed without a duty."""
    op.add_column("observation", sa.Column("beside_duty", sa.Boolean(), nullable=False, server_default=sa.false()))
