"""The Flower versions whose SuperLink and SuperNode Wattfleet can modify."""

import flwr

_SUPPORTED_VERSIONS = ("1.41.",)


def unsupported_version() -> str:
    """Return "Flower 1.41.x, but 1.30.0 is installed" if this version is not supported, else an empty text."""
    if flwr.__version__.startswith(_SUPPORTED_VERSIONS):
        return ""
    supported = ", ".join(f"{version}x" for version in _SUPPORTED_VERSIONS)
    return f"Flower {supported}, but {flwr.__version__} is installed"
