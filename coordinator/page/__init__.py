"""The coordinator's web page: HTML and server-sent events of what the commands show, from the same queries."""
