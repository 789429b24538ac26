"""A SuperNode that fetches messages sooner, and handles each one in a process whose imports are already done."""
