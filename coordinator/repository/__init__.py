"""The fleet together with its store: what the services read and change, and what keeps both in step."""
