"""Parsing JSON and TOML files: every error is a ValueError with one short line."""

import json

import pytest

from wattfleet_io.parsing import parse_json, parse_json_object, parse_toml


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


@pytest.mark.parametrize(
    "text",
    [
        "a." * 100_000 + "a = 1",
        "[" + "a." * 100_000 + "a]",
        "b = {" + '"a" . ' * 100_000 + "a = 1}",
        "b = {c = 1, " + "'a'." * 100_000 + "a = 1}",
    ],
)
def test_a_toml_key_of_100000_parts_is_refused_before_it_is_parsed(text: str) -> None:
    with pytest.raises(ValueError, match="a key has more than 16 parts"):
        parse_toml(text.encode())


def test_toml_strings_may_have_any_number_of_dots() -> None:
    text = "a." * 100
    assert parse_toml(f'a.b.c = "{text}"\nd = ["{text}", \'{text}\']\n'.encode()) == {
        "a": {"b": {"c": text}},
        "d": [text, text],
    }


@pytest.mark.parametrize("text", ["[1]", "null", "{", b"\xff"])
def test_what_is_no_json_object_is_refused(text: str | bytes) -> None:
    assert parse_json_object('{"a": 1}') == {"a": 1}
    with pytest.raises(ValueError):
        parse_json_object(text)
