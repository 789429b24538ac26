"""The tables as created before they had versions.

Files of that time may lack some tables, because missing tables were created whenever a file was opened.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the missing tables."""
    op.create_table(
        "device",
        sa.Column("device_id", sa.String(), primary_key=True),
        sa.Column("board", sa.String(), nullable=False),
        sa.Column("evidence", sa.String(), nullable=False),
        sa.Column("mode_count", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("profiled_modes", sa.Integer(), nullable=False),
        sa.Column("detail", sa.String(), nullable=False),
        sa.Column("front", sa.String()),
        sa.Column("idle_w", sa.Double()),
        sa.Column("reference_digest", sa.String(), nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "node",
        sa.Column("node_id", sa.String(), primary_key=True),
        sa.Column("device_id", sa.String(), nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "run",
        sa.Column("order", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("run_id", sa.String(), nullable=False, unique=True),
        sa.Column("strategy", sa.String(), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("initial_metrics", sa.JSON(), nullable=False),
        sa.Column("error", sa.String(), nullable=False),
        sa.Column("finished", sa.Boolean(), nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "round",
        sa.Column("order", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("plan_id", sa.String(), nullable=False, unique=True),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("epochs", sa.Double(), nullable=False),
        sa.Column("plan", sa.String(), nullable=False),
        sa.Column("idle_w", sa.Double(), nullable=False),
        sa.Column("failed", sa.JSON(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("wall_s", sa.Double()),
        if_not_exists=True,
    )
    op.create_index("ix_round_run_id", "round", ["run_id"], if_not_exists=True)
    op.create_table(
        "round_results",
        sa.Column("plan_id", sa.String(), primary_key=True),
        sa.Column("results", sa.JSON(), nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "observation",
        sa.Column("plan_id", sa.String(), primary_key=True),
        sa.Column("device_id", sa.String(), primary_key=True),
        sa.Column("epoch_s", sa.Double(), nullable=False),
        sa.Column("power_w", sa.Double(), nullable=False),
        if_not_exists=True,
    )
