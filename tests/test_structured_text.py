"""Limits of TOML, JSON and YAML: hostile documents are one error at once, others are read as by the libraries."""

import json
import tomllib

import pytest

from megalin.structured_text import StructureError, parse_json, parse_toml, parse_yaml

ALIASES = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))])

PAIRS = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} !!pairs [{', '.join([f'k: *a{n - 1}'] * 9)}]" for n in range(1, 30))])


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_toml, "x = " + "[" * 50_000, "nested more than 100 deep"),
        (parse_toml, "x = " + "[" * 101 + "]" * 101, "nested more than 100 deep"),
        (parse_toml, "x = " + "{a=" * 50_000, "nested more than 100 deep"),
        (parse_toml, "a." * 500_000 + "b = 1", "a dotted key has more than 100 parts"),
        (parse_toml, "[" + "'a' . " * 101 + "b]", "a dotted key has more than 100 parts"),
        (parse_toml, "x = " + "9" * 5_000, "an integer of more than 4,300 digits"),
        (parse_toml, "x = [9223372036854775808]", "an integer beyond 64 bits"),
        (parse_toml, "x = -9223372036854775809", "an integer beyond 64 bits"),
        (parse_toml, "x = ", "Invalid value"),
        (parse_json, "[" * 200_000, "nested more than 100 deep"),
        (parse_json, '{"a":' * 101 + "1" + "}" * 101, "nested more than 100 deep"),
        (parse_json, "9" * 5_000, "an integer of more than 4,300 digits"),
        (parse_json, b"\xff", "can't decode"),
        (parse_yaml, "[" * 50_000, "nested more than 100 deep"),
        (parse_yaml, ALIASES, "expands to more than 10,000,000 values"),
        (parse_yaml, "a: &a [*a]", "nested more than 100 deep"),
        (parse_yaml, PAIRS, "expands to more than 10,000,000 values"),
        (parse_yaml, "a: 0x" + "f" * 10_000, "an integer beyond 1024 bits"),
        (parse_yaml, "a: 1" + ":1" * 100_000, "an integer beyond 1024 bits"),
        (parse_json, "9" * 400, "an integer beyond 1024 bits"),
        (parse_yaml, "a: b\n" * 200_000, "more than 524,288 characters"),
        (parse_yaml, "a: !!python/object/apply:os.mkdir [ran]", "could not determine a constructor"),
    ],
)
def test_hostile_documents_are_refused(parse, text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_ordinary_documents_are_read(tmp_path):
    text = 'a.b.c = [1, -2, 9223372036854775807]\n"x.y" = "1.2.3"\n[t]\nd = 1979-05-27\n'
    assert parse_toml(text) == tomllib.loads(text)
    nested = "[" * 100 + "]" * 100
    assert parse_toml(f"x = {nested[1:-1]}") == tomllib.loads(f"x = {nested[1:-1]}")
    assert parse_json(nested) == json.loads(nested)
    assert parse_json(b'{"n": 1000000000000000019884624838656}') == {"n": 10**30 + 19884624838656}
    assert parse_yaml("a: &a {b: [1, 2]}\nc: *a\n") == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}}


def test_long_texts_are_searched_in_linear_time():
    with pytest.raises(tomllib.TOMLDecodeError):
        parse_toml("a" * 2_000_000)
    with pytest.raises(tomllib.TOMLDecodeError):
        parse_toml("'a'" * 300_000)
    assert issubclass(StructureError, ValueError)
