"""Wattfleet: trains with Flower on NVIDIA Jetsons under a power budget.

A Flower app imports `wattfleet.flower`, a program that answers requests `wattfleet.serving`, and who computes with
power modes `wattfleet.core`.
"""
