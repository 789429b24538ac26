"""The TOML file that lists the corpora from which a reference learns its prior."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wattfleet.errors import InvalidInputError
from wattfleet.modes import BOARDS, LARGEST_COUNT, Board, Profile, WorkloadFacts, read_profile, stated_facts
from wattfleet.prediction import MAX_MEMBERS
from wattfleet_io.parsing import parse_toml


@dataclass(frozen=True)
class PopulationCorpus:
    """A measured workload of the population.

    Attributes:
        name: its file's name.
        network: the network that it runs; all corpora of one network are left out together.
        board: the board that it was measured on.
        facts: its task, and the number of loader workers.
        profile: its measured rows.
    """

    name: str
    network: str
    board: Board
    facts: WorkloadFacts
    profile: Profile


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    csv: Annotated[str, Field(min_length=1)]
    network: Annotated[str, Field(min_length=1)]
    board: str
    loader_workers: Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
    batch: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    corpus: Annotated[list[_Entry], Field(min_length=1, max_length=MAX_MEMBERS)]


def read_population(path: Path, data: Path) -> list[PopulationCorpus]:
    """Read the corpora that a TOML file lists.

    Args:
        path: the TOML file, with a table `[[corpus]]` for each corpus.
        data: the folder of the CSV files.

    Raises:
        InvalidInputError: the file or a corpus cannot be read, an entry is wrong, or a corpus is listed twice.
    """
    try:
        listed = _File.model_validate(parse_toml(path.read_bytes())).corpus
    except FileNotFoundError:
        raise InvalidInputError(f"{path}: no such file") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInputError(f"{path}, {where}: {first['msg']}; expected keys are {', '.join(_KEYS)}") from None
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path}: cannot be read as TOML: {error}") from None
    corpora = [_read(entry, data / entry.csv, path) for entry in listed]
    known: set[str] = set()
    for corpus in corpora:
        sha256 = corpus.profile.sha256()
        if sha256 in known:
            raise InvalidInputError(f"{path}, {corpus.name}: its rows are listed twice: remove one of the two entries")
        known.add(sha256)
    return corpora


_KEYS = tuple(_Entry.model_fields)


def _read(entry: _Entry, csv: Path, path: Path) -> PopulationCorpus:
    if entry.board not in BOARDS:
        raise InvalidInputError(f"{path}, {entry.csv}: unknown board {entry.board!r}: give one of {', '.join(BOARDS)}")
    profile = read_profile(csv)
    facts = stated_facts(str(csv), profile, None, entry.batch, entry.loader_workers)
    return PopulationCorpus(csv.name, entry.network, BOARDS[entry.board], facts, profile)
