"""Whether each training was observed beside a duty."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add the column; trainings of before count as observed alone."""
    op.add_column("observation", sa.Column("beside_duty", sa.Boolean(), nullable=False, server_default=sa.false()))
