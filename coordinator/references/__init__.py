"""Published and signed references: those in force, their check, their signed metadata, and the signers' folder."""
