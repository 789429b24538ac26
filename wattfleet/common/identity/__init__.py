"""Identities in a fleet: ids, certificates, the authority that issues them, and the channels that use them."""
