"""What the coordinator keeps across restarts, in an SQLite file or in PostgreSQL, and who may write it."""
