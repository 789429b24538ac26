"""The fleet's state: pure state machines, driven by the services and by tests alike."""
