"""The rounds of all runs: cached records, commitments to devices, latest results, and requests for a plan."""
