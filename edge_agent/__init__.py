"""The process on each Jetson: devices, profiler, agent, and the service for apps."""
