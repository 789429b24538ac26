"""The budgets in force, where they come from, and rounds in flight trimmed to them."""
