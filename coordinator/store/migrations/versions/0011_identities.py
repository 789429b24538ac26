"""Adds identities: invites, certificates, the audit log, and the supply that a device's invite assigns."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the tables and the column."""
    op.add_column("device_overrides", sa.Column("supply", sa.String(), nullable=False, server_default=""))
    op.create_table(
        "invite",
        sa.Column("token_hash", sa.String(), primary_key=True),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("site", sa.String(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("made_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("made_by", sa.String(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("uses_left", _COUNT, nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "certificate",
        sa.Column("serial", sa.String(), primary_key=True),
        sa.Column("peer", sa.String(), nullable=False),
        sa.Column("issuer", sa.String(), nullable=False),
        sa.Column("issued_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("not_after", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("flower_key", sa.String(), nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_table(
        "audit_entry",
        sa.Column("order", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("entry_id", sa.String(), nullable=False, unique=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("caller", sa.String(), nullable=False),
        sa.Column("method", sa.String(), nullable=False),
        sa.Column("request", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("checksum", _COUNT),
    )
    op.create_index("ix_audit_entry_at", "audit_entry", ["at"])
