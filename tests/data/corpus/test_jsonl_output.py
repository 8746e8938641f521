"""Values without a JSON form are refused, so that every written line can be read again."""

import pytest

from megalin.data.corpus.jsonl_output import JsonLinesWriter


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_value_that_is_no_json_is_not_written(tmp_path, value):
    with pytest.raises(ValueError, match="not JSON compliant"), JsonLinesWriter(tmp_path / "x.jsonl") as writer:
        writer.write({"text": "a", "n": [value]})
    assert not list(tmp_path.iterdir())
