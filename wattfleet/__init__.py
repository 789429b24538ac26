"""The pure core of Wattfleet: power modes, profiles, predictors, fronts and round plans.

Nothing here opens a socket, starts a thread or reads a clock; the services and the simulation drive it.
"""
