"""Settings made by commands: tags and drained devices, budgets, and reference predictors."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "operator_say",
        sa.Column("device_id", sa.String(), primary_key=True),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("drained", sa.Boolean(), nullable=False),
    )
    op.create_table(
        "budget_override",
        sa.Column("supply", sa.String(), primary_key=True),
        sa.Column("watts", sa.Double(), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True)),
    )
    op.create_table(
        "reference",
        sa.Column("digest", sa.String(), primary_key=True),
        sa.Column("manifest", sa.LargeBinary(), nullable=False),
        sa.Column("weights", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "reference_pin",
        sa.Column("only", _COUNT, primary_key=True, autoincrement=False),
        sa.Column("digest", sa.String(), nullable=False),
    )
