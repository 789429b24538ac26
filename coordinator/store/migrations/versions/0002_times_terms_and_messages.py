"""Adds times and ownership terms; stores fronts and plans as bytes, and fronts in their own table."""

import json

import numpy as np
import sqlalchemy as sa
from alembic import context, op
from google.protobuf import json_format

from wattfleet_proto.convert import front_from_message
from wattfleet_proto.v1 import planning_pb2, power_pb2

revision = "0002"
down_revision = "0001"

_COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Convert tables and rows of the first version."""
    op.create_table(
        "coordinator_term",
        sa.Column("only", _COUNT, primary_key=True, autoincrement=False),
        sa.Column("term", _COUNT, nullable=False),
    )
    op.execute("INSERT INTO coordinator_term VALUES (1, 0)")
    _devices()
    _runs()
    _rounds()


def _devices() -> None:
    op.create_table(
        "front",
        sa.Column("device_id", sa.String(), primary_key=True),
        sa.Column("points", sa.LargeBinary(), nullable=False),
    )
    rows = op.get_bind().execute(sa.text("SELECT device_id, front FROM device WHERE front IS NOT NULL")).all()
    front = sa.table("front", sa.column("device_id"), sa.column("points"))
    op.bulk_insert(front, [{"device_id": row.device_id, "points": _front_bytes(row.front)} for row in rows])
    with op.batch_alter_table("device") as device:
        device.drop_column("front")
        device.alter_column("mode_count", existing_type=sa.Integer(), type_=_COUNT)
        device.alter_column("profiled_modes", existing_type=sa.Integer(), type_=_COUNT)
        device.alter_column("idle_w", existing_type=sa.Float(), type_=sa.Double())
        device.add_column(sa.Column("first_seen_at", _TIME))
        device.add_column(sa.Column("last_seen_at", _TIME))


def _runs() -> None:
    with op.batch_alter_table("run") as run:
        run.alter_column("rounds", existing_type=sa.Integer(), type_=_COUNT)
        run.alter_column(
            "initial_metrics",
            existing_type=sa.JSON(),
            type_=sa.Text(),
            postgresql_using="initial_metrics::text",
        )
        run.add_column(sa.Column("started_at", _TIME))
        run.add_column(sa.Column("finished_at", _TIME))
    op.create_index("ix_run_finished_at", "run", ["finished_at"])
    # It is unknown when they ended, so retention counts from now.
    run_ = sa.table("run", sa.column("finished", sa.Boolean()), sa.column("finished_at", _TIME))
    op.execute(sa.update(run_).where(run_.c.finished).values(finished_at=context.config.attributes["now"]()))


def _rounds() -> None:
    rows = op.get_bind().execute(sa.text("SELECT plan_id, plan, failed FROM round")).all()
    kept = {
        row.plan_id: row.results
        for row in op.get_bind().execute(sa.text("SELECT plan_id, results FROM round_results")).all()
    }
    with op.batch_alter_table("round") as round_:
        round_.drop_column("plan")
        round_.drop_column("failed")
        round_.alter_column("number", existing_type=sa.Integer(), type_=_COUNT)
        round_.alter_column("wall_s", existing_type=sa.Float(), type_=sa.Double())
        round_.alter_column("metrics", existing_type=sa.JSON(), type_=sa.Text(), postgresql_using="metrics::text")
        round_.add_column(sa.Column("nodes", sa.Text(), nullable=False, server_default="{}"))
        round_.add_column(sa.Column("results", sa.Text(), nullable=False, server_default="[]"))
        round_.add_column(sa.Column("planned_at", _TIME))
        round_.add_column(sa.Column("finished_at", _TIME))
    # In a second step, because the old and the new column have the same name.
    with op.batch_alter_table("round") as round_:
        round_.add_column(sa.Column("plan", sa.LargeBinary(), nullable=False, server_default=""))
    for row in rows:
        plan = json_format.Parse(row.plan, planning_pb2.PlanRoundResponse())
        nodes = {assignment.device_id: assignment.node_id for assignment in plan.assignments}
        op.get_bind().execute(
            sa.text("UPDATE round SET plan = :plan, nodes = :nodes, results = :results WHERE plan_id = :plan_id"),
            {
                "plan_id": row.plan_id,
                "plan": plan.SerializeToString(deterministic=True),
                "nodes": json.dumps(nodes),
                "results": kept.get(row.plan_id) or _results(json.loads(row.failed)),
            },
        )
    with op.batch_alter_table("round") as round_:
        for column in ("plan", "nodes", "results"):
            round_.alter_column(column, server_default=None)
    op.drop_table("round_results")


def _front_bytes(text: str) -> bytes:
    front = front_from_message(json_format.Parse(text, power_pb2.Front()))
    columns = [front.modes, front.epoch_s, front.power_w, front.epoch_log_sd, front.power_log_sd, front.warmup_s]
    return np.column_stack(columns).astype("<f8").tobytes()


def _results(failed: list[str]) -> str:
    """Derive the results of a round for which only the failed devices were stored."""
    return json.dumps(
        [
            {"device_id": each, "failure": "no usable reply", "num_examples": None, "loss": None, "share": 0.0}
            for each in failed
        ]
    )
