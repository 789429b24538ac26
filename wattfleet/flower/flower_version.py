"""The Flower versions whose SuperLink and SuperNode Wattfleet can modify."""

import flwr

_SUPPORTED_VERSIONS = ("1.41.", "1.42.")


def unsupported_version() -> str:
    """Return "Flower 1.41.x or 1.42.x, but 1.30.0 is installed", or an empty text if this version is supported."""
    if flwr.__version__.startswith(_SUPPORTED_VERSIONS):
        return ""
    supported = " or ".join(f"{version}x" for version in _SUPPORTED_VERSIONS)
    return f"Flower {supported}, but {flwr.__version__} is installed"
