"""The coordinator's persistent state, in an SQLite file or in PostgreSQL, and the ownership of this store."""
