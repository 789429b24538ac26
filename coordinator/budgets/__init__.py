"""The budgets in force and their sources."""
