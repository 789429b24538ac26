"""The Flower versions whose SuperLink and SuperNode Wattfleet can modify."""

import flwr

_KNOWN_VERSIONS = ("1.41.",)


def unknown_version() -> str:
    """Return "Flower 1.41.x, but 1.30.0 is installed" if this version is not supported, else an empty text."""
    if flwr.__version__.startswith(_KNOWN_VERSIONS):
        return ""
    known = ", ".join(f"{version}x" for version in _KNOWN_VERSIONS)
    return f"Flower {known}, but {flwr.__version__} is installed"
