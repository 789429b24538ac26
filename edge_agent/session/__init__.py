"""The agent's session with the coordinator: connection, outbox of unacknowledged reports, references."""
