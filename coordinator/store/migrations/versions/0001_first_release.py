"""The tables of the first release."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Create the tables."""
    _devices()
    _runs()
    _operator()
    _grants()
    _identities()
    _events()
    _coordinator()


def _devices() -> None:
    op.create_table(
        "device",
        sa.Column("device_id", sa.String(), primary_key=True),
        sa.Column("board", sa.String(), nullable=False),
        sa.Column("provenance", sa.String(), nullable=False),
        sa.Column("mode_count", _COUNT, nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("profiled_modes", _COUNT, nullable=False),
        sa.Column("detail", sa.String(), nullable=False),
        sa.Column("idle_w", sa.Double()),
        sa.Column("first_seen_at", _TIME, nullable=False),
        sa.Column("last_seen_at", _TIME, nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "workload_front",
        sa.Column("device_id", sa.String(), primary_key=True),
        sa.Column("workload", sa.String(), primary_key=True),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("points", sa.LargeBinary(), nullable=False),
        sa.Column("minibatches_per_epoch", _COUNT),
        sa.Column("profiled_modes", _COUNT, nullable=False),
        sa.Column("reference_digest", sa.String(), nullable=False),
        sa.Column("reported_at", _TIME, nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "node",
        sa.Column("node_id", sa.String(), primary_key=True),
        sa.Column("device_id", sa.String(), nullable=False),
        sa.Column("pairing_problem", sa.String()),
        sa.Column("bound_at", _TIME, nullable=False),
        sa.Column("checksum", _COUNT),
    )


def _runs() -> None:
    op.create_table(
        "run",
        sa.Column("order", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("run_id", sa.String(), nullable=False, unique=True),
        sa.Column("strategy", sa.String(), nullable=False),
        sa.Column("rounds", _COUNT, nullable=False),
        sa.Column("initial_metrics", sa.Text(), nullable=False),
        sa.Column("error", sa.String(), nullable=False),
        sa.Column("finished", sa.Boolean(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("workload", sa.String(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("needs_all", sa.Boolean(), nullable=False),
        sa.Column("energy_budget_j", sa.Double()),
        sa.Column("surveys_j", sa.Double(), nullable=False),
        sa.Column("started_at", _TIME, nullable=False),
        sa.Column("finished_at", _TIME),
        sa.Column("checksum", _COUNT),
    )
    op.create_index("ix_run_finished_at", "run", ["finished_at"])
    op.create_table(
        "round",
        sa.Column("order", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("plan_id", sa.String(), nullable=False, unique=True),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("number", _COUNT, nullable=False),
        sa.Column("epochs", sa.Double(), nullable=False),
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("nodes", sa.Text(), nullable=False),
        sa.Column("idle_w", sa.Double(), nullable=False),
        sa.Column("set_aside_j", sa.Double()),
        sa.Column("results", sa.Text(), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("wall_s", sa.Double()),
        sa.Column("planned_at", _TIME, nullable=False),
        sa.Column("finished_at", _TIME),
        sa.Column("checksum", _COUNT),
    )
    op.create_index("ix_round_run_id", "round", ["run_id"])
    op.create_table(
        "observation",
        sa.Column("plan_id", sa.String(), primary_key=True),
        sa.Column("device_id", sa.String(), primary_key=True),
        sa.Column("epoch_s", sa.Double(), nullable=False),
        sa.Column("power_w", sa.Double(), nullable=False),
        sa.Column("beside_duty", sa.Boolean(), nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "training_energy",
        sa.Column("plan_id", sa.String(), primary_key=True),
        sa.Column("device_id", sa.String(), primary_key=True),
        sa.Column("energy_j", sa.Double(), nullable=False),
        sa.Column("set_aside_j", sa.Double(), nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "counted_energy",
        sa.Column("plan_id", sa.String(), primary_key=True),
        sa.Column("holder", sa.String(), primary_key=True),
        sa.Column("planned_at", _TIME, nullable=False),
        sa.Column("ends_at", _TIME, nullable=False),
        sa.Column("set_aside_j", sa.Double(), nullable=False),
        sa.Column("spent_j", sa.Double(), nullable=False),
        sa.Column("reported_at", _TIME),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "unplanned_round",
        sa.Column("run_id", sa.String(), primary_key=True),
        sa.Column("number", _COUNT, primary_key=True, autoincrement=False),
        sa.Column("began_at", _TIME, nullable=False),
        sa.Column("ended_at", _TIME, nullable=False),
        sa.Column("wall_s", sa.Double(), nullable=False),
        sa.Column("results", sa.Text(), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("checksum", _COUNT),
    )


def _operator() -> None:
    op.create_table(
        "device_overrides",
        sa.Column("device_id", sa.String(), primary_key=True),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("drained", sa.Boolean(), nullable=False),
        sa.Column("trusted_after", sa.String(), nullable=False),
        sa.Column("supply", sa.String(), nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "budget_override",
        sa.Column("supply", sa.String(), primary_key=True),
        sa.Column("watts", sa.Double(), nullable=False),
        sa.Column("until", _TIME),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "supply_energy_budget",
        sa.Column("supply", sa.String(), primary_key=True),
        sa.Column("budget_j", sa.Double(), nullable=False),
        sa.Column("per", sa.String(), nullable=False),
        sa.Column("timezone", sa.String(), nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "battery_charge",
        sa.Column("holder", sa.String(), primary_key=True),
        sa.Column("share", sa.Double(), nullable=False),
        sa.Column("measured_at", _TIME, nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "reference",
        sa.Column("digest", sa.String(), primary_key=True),
        sa.Column("manifest", sa.LargeBinary(), nullable=False),
        sa.Column("weights", sa.LargeBinary(), nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "reference_pin",
        sa.Column("rank", _COUNT, primary_key=True, autoincrement=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("checksum", _COUNT),
    )


def _grants() -> None:
    op.create_table(
        "given_up_training",
        sa.Column("device_id", sa.String(), primary_key=True),
        sa.Column("plan_id", sa.String(), nullable=False),
        sa.Column("limit_w", sa.Double()),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "grant_lifetime",
        sa.Column("only", _COUNT, primary_key=True, autoincrement=False),
        sa.Column("lifetime_s", sa.Double(), nullable=False),
        sa.Column("checksum", _COUNT),
    )


def _identities() -> None:
    op.create_table(
        "invite",
        sa.Column("token_hash", sa.String(), primary_key=True),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("site", sa.String(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("made_at", _TIME, nullable=False),
        sa.Column("made_by", sa.String(), nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.Column("uses_left", _COUNT, nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "certificate",
        sa.Column("serial", sa.String(), primary_key=True),
        sa.Column("peer", sa.String(), nullable=False),
        sa.Column("issuer", sa.String(), nullable=False),
        sa.Column("issued_at", _TIME, nullable=False),
        sa.Column("not_after", _TIME, nullable=False),
        sa.Column("revoked_at", _TIME),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("flower_key", sa.String(), nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "audit_entry",
        sa.Column("order", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("entry_id", sa.String(), nullable=False, unique=True),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("caller", sa.String(), nullable=False),
        sa.Column("method", sa.String(), nullable=False),
        sa.Column("request", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_index("ix_audit_entry_at", "audit_entry", ["at"])


def _events() -> None:
    op.create_table(
        "event",
        sa.Column("order", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("event_id", sa.String(), nullable=False, unique=True),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.Column("needs_attention", sa.Boolean(), nullable=False),
        sa.Column("device_id", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("round", _COUNT, nullable=False),
        sa.Column("supply", sa.String(), nullable=False),
        sa.Column("caller", sa.String(), nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_index("ix_event_at", "event", ["at"])
    op.create_index("ix_event_device_id", "event", ["device_id"])


def _coordinator() -> None:
    term = op.create_table(
        "coordinator_term",
        sa.Column("only", _COUNT, primary_key=True, autoincrement=False),
        sa.Column("term", _COUNT, nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.bulk_insert(term, [{"only": 1, "term": 0}])
    op.create_table(
        "coordinator_clock",
        sa.Column("only", _COUNT, primary_key=True, autoincrement=False),
        sa.Column("noted_at", _TIME, nullable=False),
        sa.Column("boot_id", sa.String(), nullable=False),
        sa.Column("since_boot_s", sa.Double(), nullable=False),
        sa.Column("jumped_at", _TIME),
        sa.Column("checksum", _COUNT),
    )
