"""The rounds of all runs: cached records, grants to devices, latest results, and requests for a plan."""
