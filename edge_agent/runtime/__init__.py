"""The agent process: its configuration, state machine, recovery, and one device served round after round."""
