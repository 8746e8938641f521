"""The config reference in docs/configuration.md, against the output of its tool."""

from pathlib import Path

from config_reference import reference

ROOT = Path(__file__).parents[2]


def test_page_is_what_the_tool_prints():
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == reference(), "run python tools/config_reference.py > docs/configuration.md"
