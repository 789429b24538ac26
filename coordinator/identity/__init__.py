"""Who may do what: the folder with the authority's keys, the callers of RPCs, and the table of roles and RPCs."""
