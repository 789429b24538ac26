"""How commands lay out what they found on a terminal."""
