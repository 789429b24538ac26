"""Authentication and authorisation: the folder of the authority's keys, the callers of RPCs, and the table of roles."""
