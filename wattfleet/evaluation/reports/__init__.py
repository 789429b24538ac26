"""The report of an evaluation over a folder of measured profiles: its data and its HTML page."""
