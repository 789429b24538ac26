"""The ServerApp's side: strategies steered by the coordinator's round plans."""
