"""The server: enrolment, sessions, store, planning, metrics, and the Flower strategy wrapper."""
