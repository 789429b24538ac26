"""JSON of files: whatever is wrong with it is a ValueError in one short line."""

import json

import pytest

from wattfleet_io.parsing import parse_json


@pytest.mark.parametrize("content", [{"mode": [6, 1510400, -5, 2**63 - 1]}, [1.5, None, True, "text"], 3, {}])
def test_ordinary_documents_are_parsed(content: object) -> None:

    assert parse_json(json.dumps(content)) == content
    assert parse_json(json.dumps(content).encode()) == content


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "nested"),
        ("[" * 500 + "]" * 500, "nested"),
        ('{"a":' * 17 + "1" + "}" * 17, "nested"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
        ("-" + "9" * 20, "digits"),
        ("{", "Expecting"),
        (b"\xff\xfe\xfd", "decode"),
    ],
)
def test_what_cannot_be_used_is_a_value_error(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        parse_json(text)
    assert len(str(raised.value)) < 200
