"""Adds the owner of a run; runs that were stored before have no owner."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the column."""
    op.add_column("run", sa.Column("owner", sa.String(), nullable=False, server_default=""))
