"""Power modes: the boards that offer them, and measured profiles of a workload over them."""
