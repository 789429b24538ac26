"""A damaged file is either read exactly as it was stored, or refused at the start in one line."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from coordinator.errors import DamagedStoreError
from coordinator.store.store import Store
from tests.fakes.full_store import NOW, everything_in, fill, served_by
from wattfleet.errors import WattfleetError

_PAGE = 4096
Damage = Callable[[bytearray], None]


def flip(place: int, bits: int) -> Damage:
    def damage(content: bytearray) -> None:
        content[place] ^= bits

    return damage


def overwrite(place: int, value: int) -> Damage:
    def damage(content: bytearray) -> None:
        content[place : place + 512] = bytes([value]) * len(content[place : place + 512])

    return damage


def truncate(length: int) -> Damage:
    def damage(content: bytearray) -> None:
        del content[length:]

    return damage


def damages(size: int, many: int) -> Iterator[tuple[str, Damage]]:
    """Damages by name, the same ones in each run."""
    draw = random.Random(14)
    for place in range(100):  # the header of the file
        yield f"header byte {place}", flip(place, 1 << draw.randrange(8))
    for page in range(size // _PAGE):  # the header of each page
        yield f"page {page}", flip(page * _PAGE + draw.randrange(8), 1 << draw.randrange(8))
    for place in sorted(draw.sample(range(size), many)):
        yield f"byte {place}", flip(place, draw.choice((1, 32, 0xFF)))
    for place in range(0, size, _PAGE // 2 * 5):
        yield f"zeros at {place}", overwrite(place, 0)
        yield f"noise at {place}", overwrite(place, 0xA5)
    for length in (*draw.sample(range(size), 15), *range(_PAGE, size, 9 * _PAGE)):
        yield f"cut to {length}", truncate(length)


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_file_serves_what_was_stored_or_is_refused_in_one_line(tmp_path: Path, every: int) -> None:
    path = tmp_path / "coordinator.db"
    fill(path)
    pristine = path.read_bytes()
    right = everything_in(path)
    wrong: dict[str, str] = {}
    outcomes: Counter[str] = Counter()
    for name, damage in islice(damages(len(pristine), many=250), None, None, every):
        content = bytearray(pristine)
        damage(content)
        for left in tmp_path.iterdir():
            left.unlink()
        path.write_bytes(content)
        try:
            store = Store(path, lambda: NOW)
        except WattfleetError as refusal:
            said = str(refusal)
            outcomes["refused"] += 1
            if not (said.startswith(str(path)) and "\n" not in said and len(said) < 500 and "restore" in said):
                wrong[name] = f"refused unclearly: {said}"
            continue
        except Exception as error:
            wrong[name] = f"ended the start with {type(error).__name__}: {error}"
            continue
        with closing(store):
            try:
                outcomes["served"] += 1
                if served_by(store) != right:
                    wrong[name] = "served wrong data"
            except Exception as error:
                wrong[name] = f"failed when read with {type(error).__name__}: {error}"
    assert wrong == {}
    assert outcomes["served"] > 20 / every and outcomes["refused"] > 200 / every


def test_a_table_definition_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.db"
    fill(path)
    content = path.read_bytes()
    begin = content.index(b"CREATE TABLE ")
    path.write_bytes(content[:begin] + b"CREATE\xceTABLE " + content[begin + len(b"CREATE TABLE ") :])
    with pytest.raises(DamagedStoreError, match="restore a backup"):
        Store(path, lambda: NOW)
