"""Plain names: `device.evidence` becomes `provenance`, and the table `operator_say` becomes `device_overrides`."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Rename the column and the table."""
    op.alter_column("device", "evidence", new_column_name="provenance")
    op.rename_table("operator_say", "device_overrides")
