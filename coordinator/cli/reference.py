"""`wattfleet coordinator reference`: the reference predictors that agents transfer from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import ClientCommand, JsonOption, connected
from coordinator.cli.reference_keys import app as keys_commands
from coordinator.cli.reference_keys import sign, sign_references
from wattfleet_io.console import count_of, print_json, print_line, terminal

if TYPE_CHECKING:
    from wattfleet.prediction import Artefact
    from wattfleet_proto.v1 import operator_pb2

app = typer.Typer(no_args_is_help=True, help="Manage the reference predictors that agents transfer from.")

app.add_typer(keys_commands, name="keys")
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
    content = [_content(view) for view in answer.references]
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
    from coordinator.references import require_size
    from wattfleet.prediction import read_artefact

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
    from wattfleet.errors import InvalidInputError

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


def _content(view: operator_pb2.ReferenceView) -> dict[str, Any]:
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

    from wattfleet_io.tables import Column, FittingTable, columns, numbers

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
