"""How a client reaches its coordinator: the address, and the folder of the client's identity."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import grpc

from wattfleet.errors import InvalidInputError
from wattfleet_identity.channels import (
    PLAINTEXT_WARNING,
    Options,
    open_async_channel,
    open_channel,
    require_protected,
)
from wattfleet_identity.identity_folder import Identity, read_identity
from wattfleet_io.addresses import split_address
from wattfleet_io.connection_variables import IDENTITY_VARIABLE
from wattfleet_io.settings.user_file import config_folder

DEFAULT_ADDRESS = "127.0.0.1:7070"
OPERATOR_FOLDER = Path("wattfleet-identity/operator")
"""Where `wattfleet coordinator init` puts the operator's identity, below the current directory."""


def user_folder() -> Path:
    """Return the folder in which `wattfleet join` stores the user's identity."""
    return config_folder() / "identity"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A coordinator, and how a client connects to it.

    The identity is read again for each channel, so that a renewed certificate is used without a restart.

    Args:
        address: the coordinator's host:port.
        folder: the folder of the client's identity, which may be empty; None for plaintext.
        is_insecure: whether plaintext may leave this machine.
    """

    address: str
    folder: Path | None = None
    is_insecure: bool = False

    @classmethod
    def of(cls, address: str | None, folder: Path | None, is_insecure: bool = False) -> Endpoint:
        """Find the coordinator.

        Args:
            address: its host:port; None for the one at which the identity was enrolled, or else `DEFAULT_ADDRESS`.
            folder: the folder of the client's identity, which may be empty; None for plaintext.
            is_insecure: whether plaintext may leave this machine.

        Raises:
            InvalidInputError: the address is malformed, the identity is damaged, or plaintext would leave this machine
                although it must not.
        """
        identity = None if folder is None else read_identity(folder)
        found = address or (identity.coordinator if identity else "") or DEFAULT_ADDRESS
        if not found.startswith("unix:"):
            host, port = split_address(found)
            found = f"{host}:{port}"
        require_protected(found, identity, is_insecure)
        return cls(found, folder, is_insecure)

    def identity(self) -> Identity | None:
        """The identity that is on disk now; None for plaintext.

        Raises:
            InvalidInputError: the identity is damaged, or it was removed and plaintext must not leave this machine.
        """
        identity = None if self.folder is None else read_identity(self.folder)
        require_protected(self.address, identity, self.is_insecure)
        return identity

    @property
    def is_exposed(self) -> bool:
        """Whether plaintext leaves this machine.

        Raises:
            InvalidInputError: the identity is damaged.
        """
        return require_protected(self.address, self.identity(), self.is_insecure)

    @property
    def warning(self) -> str | None:
        """The warning about the connection for every screen and log; None unless plaintext leaves this machine.

        Raises:
            InvalidInputError: the identity is damaged.
        """
        return f"the connection to {self.address} is {PLAINTEXT_WARNING}" if self.is_exposed else None

    def channel(self) -> grpc.Channel:
        """Open a channel of a synchronous client; errors as for `identity`."""
        return open_channel(self.address, self.identity())

    def async_channel(self, options: Options) -> grpc.aio.Channel:
        """Open a channel for asyncio with gRPC's options; errors as for `identity`."""
        return open_async_channel(self.address, self.identity(), options)


def named_folder(named: Path | None, *defaults: Path) -> Path | None:
    """Find the folder of a client's identity.

    Args:
        named: the folder that the user named; None for that of the environment variable `WATTFLEET_IDENTITY`.
        defaults: folders to try otherwise, in order.

    Returns:
        None if nothing is named and no default has an identity.

    Raises:
        InvalidInputError: the named folder has no identity, or an identity is damaged.
    """
    if named is None and (variable := os.environ.get(IDENTITY_VARIABLE)):
        named = Path(variable)
    if named is not None:
        require_identity(named)
        return named
    return next((each for each in defaults if read_identity(each) is not None), None)


def require_identity(folder: Path) -> Identity:
    """Read the identity in a folder.

    Raises:
        InvalidInputError: there is no identity, or it is damaged.
    """
    identity = read_identity(folder)
    if identity is None:
        raise InvalidInputError(
            f"{folder} has no identity: enrol with `wattfleet join --identity {folder}`, on a device with"
            " `wattfleet agent join`, or name another folder"
        )
    return identity
