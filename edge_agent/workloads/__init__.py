"""The workloads that are trained while a board is measured: the shipped networks, and how to load your own."""
