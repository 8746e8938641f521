"""The tables of docs/interchange.md, against those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalin.interop.weights.layout import CheckpointLayout, Link
from megalin.interop.weights.layouts import LAYOUTS

PAGE = Path(__file__).parents[3] / "docs/interchange.md"
SECTIONS = {
    "TransNormerLLM": [0],
    "HGRN2 of flash-linear-attention": [1],
    "Rodimus and Rodimus+ of flash-linear-attention": [2, 3],
    "Rodimus and Rodimus+ of their authors": [4, 5],
    "LLaMA, Mistral, Qwen2 and Qwen3 of transformers": [6, 7, 8, 9],
    "Mamba-1 of transformers": [10],
    "Mamba-2 of transformers": [11],
    "GLA of flash-linear-attention": [12],
    "RetNet of flash-linear-attention": [13],
}
"""Layouts of each section, by title; the table of the last layout includes those of the ones before."""


def row(link: Link) -> str:
    """Table row of a parameter."""
    swapped = list(link.order) != sorted(link.order)
    notes = [f"parts in the order {', '.join(map(str, link.order))}"] if swapped else []
    notes += ["an extra dim of size 1 after the first"] if link.extra_dim else []
    notes += {"never": [], "ones": ["ones for a norm without weights"], "skip": ["where the model has it"]}[link.absent]
    names = ", ".join(f"`{name}`" for name in link.theirs)
    ours = ", ".join(f"`{name}`" for name in link.names)
    return f"| {ours} | {names} | {'; '.join(notes)} |"


def rows(layout: CheckpointLayout) -> list[str]:
    """Rows of a layout's table: the model's, then a block's."""
    return [row(link) for link in (*layout.model, *layout.block)]


@pytest.mark.parametrize("title", list(SECTIONS))
def test_table_of_the_page_is_the_table_of_the_code(title: str):
    text = PAGE.read_text(encoding="utf-8")
    (section,) = re.findall(rf"^### {re.escape(title)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    written = [line for line in section.splitlines() if line.startswith("| `")]
    assert written == rows(LAYOUTS[SECTIONS[title][-1]])


def test_every_layout_is_on_the_page():
    assert sorted(number for numbers in SECTIONS.values() for number in numbers) == list(range(len(LAYOUTS)))
