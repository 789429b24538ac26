"""The `wattfleet agent` commands, one module each; `commands` registers them."""
