"""How commands show what they found: tables, numbers, times and plain values."""
