"""Adds the watts of grants to measure, which belong to no round."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Add the column; the watts of existing rows are those of their rounds."""
    op.add_column("given_up_training", sa.Column("limit_w", sa.Double()))
