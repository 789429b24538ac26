"""The process on each Jetson: devices, profiler, agent, and the Flower mod."""
