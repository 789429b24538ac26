"""Which versions of Flower the commands know that run a SuperLink or a SuperNode and change it."""

import flwr

_KNOWN_VERSIONS = ("1.41.",)


def unknown_version() -> str:
    """What is known and what is installed, such as "Flower 1.41.x, and this is 1.30.0"; empty if this one is known."""
    if flwr.__version__.startswith(_KNOWN_VERSIONS):
        return ""
    known = ", ".join(f"{version}x" for version in _KNOWN_VERSIONS)
    return f"Flower {known}, and this is {flwr.__version__}"
