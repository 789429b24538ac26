"""`wattfleet coordinator reference`: what agents transfer from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import DEFAULT_ADDRESS, CoordinatorOption, JsonOption, connected, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from wattfleet.prediction import Artefact
    from wattfleet_proto.v1 import operator_pb2

app = typer.Typer(no_args_is_help=True, help="The reference predictors that agents transfer from.")

_CHUNK_BYTES = 64 * 1024
_SHOWN_DIGITS = 12


@app.command("list")
def list_references(coordinator: CoordinatorOption = DEFAULT_ADDRESS, json_: JsonOption = False) -> None:
    """Show what is handed out, and which of it counts."""
    from wattfleet_proto.v1 import operator_pb2

    with connected(coordinator) as client:
        answer = client.operate("ListReferences", operator_pb2.ListReferencesRequest())
    content = [_content(view) for view in answer.references]
    if json_:
        print_json(content)
    else:
        _print(content)


@app.command("publish")
def publish(
    directory: Annotated[Path, typer.Argument(help="As `wattfleet reference train --out` writes it.")],
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    json_: JsonOption = False,
) -> None:
    """Have the coordinator keep a reference predictor, to be handed out once it is pinned."""
    from coordinator.references import MAX_BYTES, MAX_MANIFEST_BYTES
    from wattfleet.errors import InvalidInputError
    from wattfleet.prediction import MANIFEST_FILE, WEIGHTS_FILE, read_artefact

    artefact = read_artefact(directory)
    for name, content, most in (
        (MANIFEST_FILE, artefact.manifest, MAX_MANIFEST_BYTES),
        (WEIGHTS_FILE, artefact.weights, MAX_BYTES),
    ):
        if len(content) > most:
            raise InvalidInputError(f"{directory}: {name} has {len(content):,} bytes, a reference's {most:,} at most")
    with connected(coordinator) as client:
        answer = client.operate("PublishReference", _parts(artefact))
    if json_:
        print_json({"digest": answer.digest, "known": answer.known})
    else:
        print(f"{answer.digest} {'was there already' if answer.known else 'is published'}")
        print(f"`wattfleet coordinator reference pin {answer.digest[:_SHOWN_DIGITS]}` has agents transfer from it")


@app.command("pin")
def pin(
    digest: Annotated[str, typer.Argument(help="Its digest, or the first digits of it.")],
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    json_: JsonOption = False,
) -> None:
    """Have all agents transfer from a reference predictor, from now on."""
    from wattfleet.errors import InvalidInputError

    if not digest:
        raise InvalidInputError("say which: `wattfleet coordinator reference list` shows them")
    _pinned(coordinator, digest, json_)


@app.command("unpin")
def unpin(coordinator: CoordinatorOption = DEFAULT_ADDRESS, json_: JsonOption = False) -> None:
    """Have agents transfer from what `serve --reference` names again."""
    _pinned(coordinator, "", json_)


def _pinned(coordinator: str, digest: str, json_: bool) -> None:
    from wattfleet_proto.v1 import operator_pb2

    with connected(coordinator) as client:
        answer = client.operate("PinReference", operator_pb2.PinReferenceRequest(digest=digest))
    if json_:
        print_json({"digest": answer.digest, "ended_sessions": answer.ended_sessions})
        return
    print(f"agents transfer from {answer.digest[:_SHOWN_DIGITS]}")
    if answer.ended_sessions:
        agents = "1 connected agent comes" if answer.ended_sessions == 1 else f"{answer.ended_sessions:,} agents come"
        print(f"{agents} back to be told")


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
    from rich.console import Console
    from rich.text import Text

    from coordinator.cli.layout import Fitting, Way, columns

    def table(more: Sequence[str]) -> Table:
        """The references; of what each is as much as there is room for."""
        table = columns(("digest", "workload", *more), ("devices",), ("how it stands",))
        for each in content:
            standing = [word for word, holds in (("in force", each["in_force"]), ("pinned", each["pinned"])) if holds]
            table.add_row(
                each["digest"][:_SHOWN_DIGITS],
                Text(each["workload"]),
                *(Text(each[name]) for name in more),
                f"{each['devices']:,}",
                Text(", ".join(standing) or "published", style="green" if each["in_force"] else ""),
            )
        return table

    console = Console(highlight=False)
    console.print(Fitting(lambda: Way(table(("board", "predictor"))), lambda: Way(table(()))))
    for each in content:
        if each["from_start"]:
            console.print(f"{each['digest'][:_SHOWN_DIGITS]} is of `serve --reference`", style="dim")
