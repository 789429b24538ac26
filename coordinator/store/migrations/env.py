"""Runs migrations within the transaction that it is given; see `coordinator/store/schema.py`."""

from alembic import context

from coordinator.store.tables import Base

# SQLite's tables can be changed within a transaction; Alembic does not count on it.
context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, transactional_ddl=True
)
context.run_migrations()
