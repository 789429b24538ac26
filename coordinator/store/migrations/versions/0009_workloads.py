"""Adds workloads: the workload of each run, and a front for each workload of a device."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the columns and the table; an existing front counts for every workload, with an empty name."""
    op.add_column("run", sa.Column("workload", sa.String(), nullable=False, server_default="unnamed"))
    op.add_column("run", sa.Column("facts", sa.Text(), nullable=False, server_default="{}"))
    op.create_table(
        "workload_front",
        sa.Column("device_id", sa.String(), primary_key=True),
        sa.Column("workload", sa.String(), primary_key=True),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("points", sa.LargeBinary(), nullable=False),
        sa.Column("minibatches_per_epoch", _COUNT),
        sa.Column("profiled_modes", _COUNT, nullable=False),
        sa.Column("reference_digest", sa.String(), nullable=False),
        sa.Column("reported_at", sa.DateTime(timezone=True)),
        sa.Column("checksum", _COUNT),
    )
    op.execute(
        "INSERT INTO workload_front (device_id, workload, facts, points, profiled_modes, reference_digest)"
        " SELECT front.device_id, '', '{}', front.points, device.profiled_modes, device.reference_digest"
        " FROM front JOIN device ON device.device_id = front.device_id"
    )
    op.drop_table("front")
    with op.batch_alter_table("reference_pin") as pin:  # several references may be pinned
        pin.alter_column("only", new_column_name="rank")
    with op.batch_alter_table("device") as device:
        device.drop_column("reference_digest")
