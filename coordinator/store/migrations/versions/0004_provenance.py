"""The column that says whether a device is simulated, replayed or hardware is named `provenance`."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Rename the column."""
    op.alter_column("device", "evidence", new_column_name="provenance")
