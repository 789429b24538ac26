"""`wattfleet coordinator reference`: the predictors that agents transfer from, and the keys that sign them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import ClientCommand, JsonOption, connected
from wattfleet.common.console import count_of, print_json, print_line, terminal

if TYPE_CHECKING:
    from coordinator.cli.client import CoordinatorClient
    from coordinator.references.signing_folder import SigningFolder
    from wattfleet.core.prediction import Artefact
    from wattfleet_proto.v1 import operator_pb2


# --- Reference keys ---------------------------------------------------------------------------------------------------
# `wattfleet coordinator reference keys` and `sign`: signing references as the operator.


_HELP = "Create, replace and show the keys that sign references."

keys_app = typer.Typer(no_args_is_help=True, help=_HELP)

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


@keys_app.callback(help=_HELP)
def group() -> None:
    """Keep the commands in a group."""


@keys_app.command("init", cls=ClientCommand)
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
    from coordinator.references.metadata import key_of_pem
    from coordinator.references.signing_folder import SigningFolder
    from wattfleet.core.errors import InvalidInputError
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
        print_json({"root": str(root), **_keys_content(folder)})
        return
    print_line(f"created {root_keys} root keys, of which {threshold} sign together, and a key for references in {out}")
    print_line("keep the root keys apart, and not on the coordinator's machine")
    print_line(f"on each device: wattfleet agent trust-references {root.name}")


@keys_app.command("rotate", cls=ClientCommand)
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
    from coordinator.references.metadata import key_of_pem
    from coordinator.references.signing_folder import SigningFolder
    from wattfleet_proto.v1 import operator_pb2

    folder = SigningFolder(keys, key or ())
    with connected() as client:
        served = client.operate("GetMetadata", operator_pb2.GetMetadataRequest())
        replaced = [each for each in replace or () if each != _ONLINE]
        online_key = key_of_pem(served.online_key) if _ONLINE in (replace or ()) else None
        old_files = folder.rotate(replaced, online_key, days)
        _publish(client, folder)
    if json_:
        print_json({**_keys_content(folder), "not_trusted": list(map(str, old_files))})
        return
    print_line(f"version {folder.root.version} of the root is served; it expires on {folder.root.expires.date()}")
    for path in old_files:
        print_line(f"{path} is no longer trusted: delete it")


@keys_app.command("show")
def show(keys: KeysArgument, json_: JsonOption = False) -> None:
    """Show the keys and the signed references of a folder."""
    from coordinator.references.signing_folder import SigningFolder

    folder = SigningFolder(keys)
    if json_:
        print_json(_keys_content(folder))
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
    from wattfleet.core.prediction import read_artefact

    signed = sign_references(list(map(read_artefact, directories or ())), keys, revoke or (), key or (), days)
    if json_:
        print_json(_keys_content(signed))
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
    from coordinator.references.published import require_size
    from coordinator.references.signing_folder import SigningFolder

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


def _keys_content(folder: SigningFolder) -> dict[str, Any]:
    roles = {
        role: {
            "version": signed.version,
            "expires_unix_s": signed.expires.timestamp(),
            "keys": [{"id": keyid, "here": is_here} for keyid, is_here in folder.keys_of(role)],
        }
        for role, signed in (("root", folder.root), ("targets", folder.targets))
    }
    return {**roles, "digests": folder.digests}


# --- Reference --------------------------------------------------------------------------------------------------------
# `wattfleet coordinator reference`: the reference predictors that agents transfer from.

app = typer.Typer(no_args_is_help=True, help="Manage the reference predictors that agents transfer from.")

app.add_typer(keys_app, name="keys")
app.command(cls=ClientCommand)(sign)

_CHUNK_BYTES = 64 * 1024
_SHOWN_DIGITS = 12
_PUBLISH_TIMEOUT_S = 150.0  # longer than the coordinator allows for an upload and its check


@app.command("list", cls=ClientCommand)
def list_references(json_: JsonOption = False) -> None:
    """List the published reference predictors, and which are in force."""
    from wattfleet_proto.v1 import operator_pb2

    with connected() as client:
        answer = client.operate("ListReferences", operator_pb2.ListReferencesRequest())
    content = [_reference_content(view) for view in answer.references]
    if json_:
        print_json(content)
    else:
        _print(content)


@app.command("publish", cls=ClientCommand)
def publish(
    directory: Annotated[Path, typer.Argument(help="Folder written by `wattfleet reference train --out`.")],
    keys: Annotated[
        Path | None,
        typer.Option(help="Also sign it with the keys in this folder (docs/references.md).", show_default=False),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Upload the reference predictor in DIRECTORY. Agents use it once it is pinned."""
    from coordinator.references.published import require_size
    from wattfleet.core.prediction import read_artefact

    artefact = read_artefact(directory)
    require_size(str(directory), artefact)
    with connected() as client:
        answer = client.operate("PublishReference", _parts(artefact), _PUBLISH_TIMEOUT_S)
    if keys is not None:
        sign_references([artefact], keys, (), (), None)
    if json_:
        print_json({"digest": answer.digest, "known": answer.known})
    else:
        print_line(f"{answer.digest} {'was already published' if answer.known else 'is published'}")
        print_line(f"to put it in force: wattfleet coordinator reference pin {answer.digest[:_SHOWN_DIGITS]}")


@app.command("remove", cls=ClientCommand)
def remove(
    digest: Annotated[str, typer.Argument(help="Digest of a published reference, or its first 6 or more digits.")],
    json_: JsonOption = False,
) -> None:
    """Remove the published reference predictor DIGEST. One that is pinned must be unpinned first."""
    from wattfleet_proto.v1 import operator_pb2

    with connected() as client:
        answer = client.operate("RemoveReference", operator_pb2.RemoveReferenceRequest(digest=digest))
    if json_:
        print_json({"digest": answer.digest})
    else:
        print(f"{answer.digest} is removed")


@app.command("pin", cls=ClientCommand)
def pin(
    digests: Annotated[
        list[str], typer.Argument(help="Digests of published references, or their first 6 or more digits.")
    ],
    json_: JsonOption = False,
) -> None:
    """Make all agents transfer from the reference predictors DIGESTS.

    With several, each is weighted by how well it predicts the modes that a device has measured for a workload.
    """
    from wattfleet.core.errors import InvalidInputError

    if not all(digests):
        raise InvalidInputError("the digest is empty; `wattfleet coordinator reference list` shows the digests")
    _pinned(digests, json_)


@app.command("unpin", cls=ClientCommand)
def unpin(json_: JsonOption = False) -> None:
    """Make all agents transfer from the predictor of `serve --reference` again."""
    _pinned([], json_)


def _pinned(digests: Sequence[str], json_: bool) -> None:
    from wattfleet_proto.v1 import operator_pb2

    request = operator_pb2.PinReferenceRequest(digest=digests[0] if digests else "", further_digests=digests[1:])
    with connected() as client:
        answer = client.operate("PinReference", request)
    in_force = [answer.digest, *answer.further_digests]
    if json_:
        print_json({"digests": in_force, "ended_sessions": answer.ended_sessions})
        return
    print_line(f"agents transfer from {', '.join(digest[:_SHOWN_DIGITS] for digest in in_force)}")
    if answer.ended_sessions:
        reconnects = "reconnects" if answer.ended_sessions == 1 else "reconnect"
        print_line(f"{count_of(answer.ended_sessions, 'agent')} {reconnects} to fetch it")


def _parts(artefact: Artefact) -> Iterator[operator_pb2.PublishReferenceRequest]:
    from wattfleet_proto.v1 import operator_pb2

    yield operator_pb2.PublishReferenceRequest(manifest=artefact.manifest)
    for offset in range(0, len(artefact.weights), _CHUNK_BYTES):
        yield operator_pb2.PublishReferenceRequest(weights_chunk=artefact.weights[offset : offset + _CHUNK_BYTES])


def _reference_content(view: operator_pb2.ReferenceView) -> dict[str, Any]:
    return {
        "digest": view.digest,
        "workload": view.workload,
        "board": view.board,
        "predictor": view.predictor,
        "size_bytes": view.size_bytes,
        "pinned": view.pinned,
        "from_start": view.from_start,
        "in_force": view.in_force,
        "devices": view.device_count,
    }


def _print(content: Sequence[dict[str, Any]]) -> None:
    from rich.text import Text

    from wattfleet.common.tables import Column, FittingTable, columns, numbers

    table = FittingTable(
        columns(
            "digest", "workload", Column("board", rank=1), Column("predictor", rank=2), numbers("devices"), "status"
        )
    )
    for each in content:
        status = [word for word, holds in (("in force", each["in_force"]), ("pinned", each["pinned"])) if holds]
        table.add(
            each["digest"][:_SHOWN_DIGITS],
            each["workload"],
            each["board"],
            each["predictor"],
            f"{each['devices']:,}",
            Text(", ".join(status) or "published", style="green" if each["in_force"] else ""),
        )
    console = terminal()
    console.print(table)
    for each in content:
        if each["from_start"]:
            console.print(f"{each['digest'][:_SHOWN_DIGITS]} comes from `serve --reference`", style="dim")
