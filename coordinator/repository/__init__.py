"""The fleet together with its store, which the services read and change, and the code that keeps both consistent."""
