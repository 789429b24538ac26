"""The ClientApp's side: a mod that trains each round in its assigned power mode."""
