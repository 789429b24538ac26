"""The state of the fleet: pure state machines that the services and the tests drive.

Nothing here reads a clock, opens a socket or touches a file.
"""
