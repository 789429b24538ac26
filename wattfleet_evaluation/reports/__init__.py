"""The report of an evaluation over a folder of measured profiles."""
