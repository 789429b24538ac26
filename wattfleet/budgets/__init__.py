"""Power budgets over time, and the tree of supplies that they apply to."""
