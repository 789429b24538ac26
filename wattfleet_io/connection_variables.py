"""The environment variables that define for all commands how to reach the coordinator."""

COORDINATOR_VARIABLE = "WATTFLEET_COORDINATOR"
"""Its host:port."""

IDENTITY_VARIABLE = "WATTFLEET_IDENTITY"
"""The folder of the identity to use."""

INSECURE_VARIABLE = "WATTFLEET_INSECURE"
"""Whether plaintext may leave this machine if there is no identity."""
