"""The coordinator's web page: shows the results of the commands' queries as HTML and server-sent events."""
