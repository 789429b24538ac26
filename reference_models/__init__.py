"""Reference predictors that ship with Wattfleet, and how they were trained."""
