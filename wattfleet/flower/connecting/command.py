"""`wattfleet flower connect`: what `flwr` needs to reach the fleet's SuperLink, written where `flwr` looks for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wattfleet.common.addresses import COORDINATOR_VARIABLE, IDENTITY_VARIABLE, OPERATOR_FOLDER
from wattfleet.common.settings.user_file import in_home, user_folder

if TYPE_CHECKING:
    from wattfleet.common.identity.channels import Endpoint

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Use Flower with the fleet.")


@app.callback()
def group() -> None:
    """Use Flower with the fleet."""


@app.command()
def connect(
    name: Annotated[str, typer.Option(help="Name of the connection, as in `flwr run APP NAME`.")] = "wattfleet",
    superlink: Annotated[
        str | None, typer.Option(help="Host:port of the SuperLink. Default: the address that the coordinator reports.")
    ] = None,
    identity: Annotated[
        Path | None,
        typer.Option(
            envvar=IDENTITY_VARIABLE,
            help=f"Folder of the identity of a Flower app or operator. Default: {in_home(user_folder())}, or"
            f" {OPERATOR_FOLDER}.",
            show_default=False,
        ),
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(envvar=COORDINATOR_VARIABLE, help="Host:port of the coordinator. Default: that of the identity."),
    ] = None,
) -> None:
    """Let `flwr` on this machine use the fleet's SuperLink, with TLS and this user's identity.

    Writes the connection to Flower's config.toml, and makes it the default one. Repeat it when `flwr` asks for it: the
    proof of identity that it stores can be used for 12 hours.
    """
    from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
    from flwr.cli.flower_config import (
        read_flower_config,
        set_default_superlink_connection,
        write_superlink_connection,
    )
    from flwr.cli.typing import SuperLinkConnection
    from flwr.common.constant import AuthnType
    from flwr.supercore.credential_store import get_credential_store

    from wattfleet.common.addresses import split_address
    from wattfleet.common.clock import utc_now
    from wattfleet.common.console import print_line
    from wattfleet.common.identity.channels import Endpoint, named_folder, require_identity
    from wattfleet.common.identity.identity_folder import FOR_SUPERLINK, LIFETIME, TRUSTED, proof_of
    from wattfleet.common.identity.peers import USERS_OF_FLWR
    from wattfleet.common.identity.renewal import expiry_text, renew_if_due
    from wattfleet.core.errors import InvalidInputError

    folder = named_folder(identity, user_folder(), OPERATOR_FOLDER)
    if folder is None:
        raise InvalidInputError(
            "there is no identity: enrol with the line of `wattfleet coordinator invite --role flower --name YOU` and"
            " `wattfleet join`, or name a folder with --identity"
        )
    folder = folder.absolute()
    peer = require_identity(folder).peer
    if peer.role not in USERS_OF_FLWR:
        raise InvalidInputError(
            f"the identity in {folder} belongs to {peer}, but `flwr` needs that of a Flower app or an operator: pass"
            " --identity FOLDER"
        )
    endpoint = Endpoint.of(coordinator, folder)
    if problem := renew_if_due(endpoint):
        print_line(f"warning: {problem}", to_stderr=True)
    found = require_identity(folder)
    address = superlink or found.superlink or _reported_address(endpoint)
    split_address(address)
    known = read_flower_config()[0].get("superlink", {}).get(name, {})
    if isinstance(known, dict) and known.get("address", address) != address:
        raise InvalidInputError(
            f"Flower's config.toml has a connection {name!r} to {known['address']}: choose another --name, or remove it"
        )
    trusted = str(folder / TRUSTED)
    write_superlink_connection(SuperLinkConnection(name, address, root_certificates=trusted))
    set_default_superlink_connection(name)
    config, store = read_flower_config()[1], get_credential_store()
    now = utc_now()
    proof = proof_of(found, FOR_SUPERLINK, now).encode()
    store.set(ACCESS_TOKEN_STORE_KEY % address, proof)
    store.set(REFRESH_TOKEN_STORE_KEY % address, b"none")  # Flower requires one, but proofs cannot be refreshed
    store.set(AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())
    print_line(f"`flwr` uses {address} as {peer}: the connection {name!r} is in {config}, and is the default one")
    print_line(
        f"The proof of identity can be used until {now + LIFETIME:%Y-%m-%d %H:%M} UTC; then run this again. The"
        f" certificate {expiry_text(found.certificate, now)}"
    )
    print_line(f"next: flwr run APP {name} --stream")


def _reported_address(endpoint: Endpoint) -> str:
    """Return the SuperLink's address from the coordinator."""
    from wattfleet.common.identity.renewal import TIMEOUT_S
    from wattfleet.core.errors import InvalidInputError
    from wattfleet.flower.superlink.server_certificate import superlink_service
    from wattfleet_proto.v1 import superlink_pb2

    with superlink_service(endpoint) as stub:
        address: str = stub.GetSuperLink(superlink_pb2.GetSuperLinkRequest(), timeout=TIMEOUT_S).address
    if not address:
        raise InvalidInputError(
            "the coordinator does not know the SuperLink's address: pass --superlink HOST:PORT, or restart the"
            " coordinator with --superlink-address HOST:PORT"
        )
    return address
