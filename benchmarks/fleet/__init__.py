"""Measures many agents on one coordinator: latency, memory, throughput, and a storm of reconnects."""
