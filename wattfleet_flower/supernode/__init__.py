"""A SuperNode that takes messages up sooner, and runs each in a process that need not import everything again."""
