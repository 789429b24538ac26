"""What an agent needs of a machine, looked at piece by piece: what is there, what is missing, what to do."""
