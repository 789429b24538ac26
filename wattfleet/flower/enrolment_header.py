"""The HTTP header in which `wattfleet-superlink` reports to a SuperNode that its key is not enrolled."""

HEADER = "x-wattfleet-enrolment"

NOT_ENROLLED = "not-enrolled"
"""The key is not on the coordinator's list. Without the header, the SuperLink may get to know the key later."""
