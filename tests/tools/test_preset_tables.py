"""The tables of presets in docs/models.md, against the output of their tool."""

import pytest
from preset_tables import PAGE, row, updated

from megalin.model.presets import preset_families, preset_names


def test_page_is_what_the_tool_writes():
    page = PAGE.read_text(encoding="utf-8")
    assert page == updated(page), "run python tools/preset_tables.py"
    assert [name for name in preset_names() if page.count(f"\n{row(name)}\n") != 1] == []


def test_families_without_a_section_stand_in_the_last_table():
    first, *others = preset_families()
    end = "<!-- end of presets -->\n"
    page = f"<!-- presets: {' '.join(others)} -->\n{end}<!-- presets: others -->\nold\n{end}"
    last = updated(page).split("<!-- presets: others -->\n")[1]
    assert [line.split("`")[1] for line in last.splitlines()[2:-1]] == preset_families()[first]


def test_family_that_does_not_exist_is_refused():
    with pytest.raises(SystemExit, match="no file of presets for gone; remove its table"):
        updated("<!-- presets: gone -->\n<!-- end of presets -->\n")
