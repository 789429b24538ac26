"""`wattfleet coordinator reference keys` and `sign`: signing references as the operator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import ClientCommand, JsonOption, connected
from wattfleet_io.console import print_json, print_line

if TYPE_CHECKING:
    from coordinator.cli.client import CoordinatorClient
    from coordinator.signing_folder import SigningFolder
    from wattfleet.prediction import Artefact

_HELP = "Create, replace and show the keys that sign references."

app = typer.Typer(no_args_is_help=True, help=_HELP)

KeysArgument = Annotated[Path, typer.Argument(help="Folder created by `wattfleet coordinator reference keys init`.")]
KeyOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--key",
        allow_from_autoenv=False,
        help="Also use the private key in this file; can be repeated.",
        show_default=False,
    ),
]
DaysOption = Annotated[
    float | None,
    typer.Option(
        "--days", help="Let the signature expire after this many days.", min=1, max=36_500, show_default=False
    ),
]
_ONLINE = "online"


@app.callback(help=_HELP)
def group() -> None:
    """Keep the commands in a group."""


@app.command("init", cls=ClientCommand)
def init(
    out: Annotated[Path, typer.Option("--out", help="Create the keys in this folder.")],
    root_keys: Annotated[int, typer.Option(help="Create this many root keys.", min=2, max=16)] = 2,
    threshold: Annotated[
        int, typer.Option(help="Require the signatures of this many root keys together.", min=1, max=15)
    ] = 1,
    json_: JsonOption = False,
) -> None:
    """Create the keys that sign references, and have the coordinator serve the first metadata.

    There are more root keys than have to sign together, so that a lost key can be replaced.
    """
    from coordinator.key_files import key_of_pem
    from coordinator.signing_folder import SigningFolder
    from wattfleet.errors import InvalidInputError
    from wattfleet_proto.v1 import operator_pb2

    with connected() as client:
        served = client.operate("GetMetadata", operator_pb2.GetMetadataRequest())
        if served.root_version:
            raise InvalidInputError(
                "the coordinator serves signed references already: use the folder with their keys, or give the"
                " coordinator another --reference-metadata directory to start again"
            )
        folder = SigningFolder.create(out, key_of_pem(served.online_key), root_keys, threshold)
        _publish(client, folder)
    root = folder.newest_root_file
    if json_:
        print_json({"root": str(root), **_content(folder)})
        return
    print_line(f"created {root_keys} root keys, of which {threshold} sign together, and a key for references in {out}")
    print_line("keep the root keys apart, and not on the coordinator's machine")
    print_line(f"on each device: wattfleet agent trust-references {root.name}")


@app.command("rotate", cls=ClientCommand)
def rotate(
    keys: KeysArgument,
    replace: Annotated[
        list[str] | None,
        typer.Option(
            allow_from_autoenv=False,
            help="Replace this key: `targets`, `online` (by the coordinator's current key), or the first 6 or more"
            " digits of a root key's id. It may be lost. Can be repeated.",
            show_default=False,
        ),
    ] = None,
    key: KeyOption = None,
    days: DaysOption = None,
    json_: JsonOption = False,
) -> None:
    """Sign a new version of the root: with other keys, or with a later expiry if none is replaced."""
    from coordinator.key_files import key_of_pem
    from coordinator.signing_folder import SigningFolder
    from wattfleet_proto.v1 import operator_pb2

    folder = SigningFolder(keys, key or ())
    with connected() as client:
        served = client.operate("GetMetadata", operator_pb2.GetMetadataRequest())
        replaced = [each for each in replace or () if each != _ONLINE]
        online_key = key_of_pem(served.online_key) if _ONLINE in (replace or ()) else None
        old_files = folder.rotate(replaced, online_key, days)
        _publish(client, folder)
    if json_:
        print_json({**_content(folder), "not_trusted": list(map(str, old_files))})
        return
    print_line(f"version {folder.root.version} of the root is served; it expires on {folder.root.expires.date()}")
    for path in old_files:
        print_line(f"{path} is no longer trusted: delete it")


@app.command("show")
def show(keys: KeysArgument, json_: JsonOption = False) -> None:
    """Show the keys and the signed references of a folder."""
    from coordinator.signing_folder import SigningFolder

    folder = SigningFolder(keys)
    if json_:
        print_json(_content(folder))
        return
    for role, signed in (("root", folder.root), ("targets", folder.targets)):
        print_line(f"{role}: version {signed.version}, expires on {signed.expires.date()}")
        for keyid, is_here in folder.keys_of(role):
            print_line(f"  key {keyid[:12]}{'' if is_here else ', whose private key is missing'}")
    for digest in folder.digests:
        print_line(f"signed: {digest}")


def sign(
    keys: Annotated[Path, typer.Option("--keys", help="Sign with the keys in this folder.")],
    directories: Annotated[
        list[Path] | None, typer.Argument(help="Folders written by `wattfleet reference train --out`.")
    ] = None,
    revoke: Annotated[
        list[str] | None,
        typer.Option(
            allow_from_autoenv=False,
            help="Stop signing the reference with this digest; can be repeated.",
            show_default=False,
        ),
    ] = None,
    key: KeyOption = None,
    days: DaysOption = None,
    json_: JsonOption = False,
) -> None:
    """Sign the reference predictors in DIRECTORIES, in addition to those signed already.

    Without any, only renew the signature.
    """
    from wattfleet.prediction import read_artefact

    signed = sign_references(list(map(read_artefact, directories or ())), keys, revoke or (), key or (), days)
    if json_:
        print_json(_content(signed))
        return
    print_line(
        f"{len(signed.digests)} references are signed, in version {signed.targets.version}; the signature expires on"
        f" {signed.targets.expires.date()}"
    )


def sign_references(
    artefacts: Sequence[Artefact],
    keys: Path,
    revoked: Sequence[str],
    further_keys: Sequence[Path],
    days: float | None,
) -> SigningFolder:
    """Sign references with an operator's folder, and have the coordinator serve the metadata."""
    from coordinator.references import require_size
    from coordinator.signing_folder import SigningFolder

    for artefact in artefacts:
        require_size(artefact.digest[:12], artefact)
    folder = SigningFolder(keys, further_keys)
    folder.sign(artefacts, revoked, days)
    with connected() as client:
        _publish(client, folder)
    return folder


def _publish(client: CoordinatorClient, folder: SigningFolder) -> None:
    from wattfleet_proto.v1 import operator_pb2

    client.operate(
        "PublishMetadata", operator_pb2.PublishMetadataRequest(roots=folder.roots, targets=folder.signed_targets)
    )


def _content(folder: SigningFolder) -> dict[str, Any]:
    roles = {
        role: {
            "version": signed.version,
            "expires_unix_s": signed.expires.timestamp(),
            "keys": [{"id": keyid, "here": is_here} for keyid, is_here in folder.keys_of(role)],
        }
        for role, signed in (("root", folder.root), ("targets", folder.targets))
    }
    return {**roles, "digests": folder.digests}
