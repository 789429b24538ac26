"""Runs migrations in the transaction of `coordinator/store/database.py`."""

from alembic import context

from coordinator.store.tables import Base

# SQLite can change tables within a transaction; Alembic assumes that it cannot.
context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, transactional_ddl=True
)
context.run_migrations()
