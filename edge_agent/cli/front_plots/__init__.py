"""A device's front as people look at it: in a terminal, as a page, as a picture."""
