"""Writes the tables of presets in docs/models.md, counted from the built models.

python tools/preset_tables.py [--check]

A table stands between the lines <!-- presets: FAMILY ... --> and <!-- end of presets -->; FAMILY is a file of
megalin/presets. The families `others` are those that no other table of the page has.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from megalin.generation.decoder import grows
from megalin.model.build import make_model
from megalin.model.counts import count
from megalin.model.language_model import LanguageModel
from megalin.model.presets import load_preset, preset_families

PAGE = Path(__file__).parents[1] / "docs/models.md"
LENGTHS = {"decoder": 8192, "encoder": 512}
"""Tokens per sequence for the operations, by the kind of model."""
BLOCK = re.compile(r"(<!-- presets: ([\w ]+) -->\n).*?(<!-- end of presets -->)", re.DOTALL)
HEAD = (
    "| preset | blocks | width | vocabulary | parameters | without embeddings | FLOPs a token | state bytes |",
    "| --- | --: | --: | --: | --: | --: | --: | --: |",
)


@cache
def row(name: str) -> str:
    """A preset's row of a table."""
    config = load_preset(name).model
    model = make_model(config)
    counts = count(model, LENGTHS[config.kind])
    state = "-"
    if isinstance(model, LanguageModel):
        size = f"{counts.state_bytes:,}" if counts.state_bytes else ""
        state = " and ".join(filter(None, (size, "grows" if grows(model) else "")))
    cells = (f"`{name}`", config.num_layers, config.hidden_size, f"{config.vocab_size:,}")
    numbers = (f"{counts.parameters:,}", f"{counts.non_embedding_parameters:,}", f"{counts.flops_per_token:.3e}", state)
    return f"| {' | '.join(map(str, (*cells, *numbers)))} |"


def table(families: list[str]) -> str:
    """The table of some families."""
    names = [name for family in families for name in preset_families()[family]]
    return "".join(f"{line}\n" for line in (*HEAD, *map(row, names))) if names else "None.\n"


def updated(page: str) -> str:
    """The page with its tables as counted now. Raises SystemExit for a family that does not exist."""
    shown = {family for _, families, _ in BLOCK.findall(page) for family in families.split()}
    if unknown := shown - preset_families().keys() - {"others"}:
        raise SystemExit(f"docs/models.md: no file of presets for {', '.join(sorted(unknown))}; remove its table")

    def families(names: str) -> Iterator[str]:
        for name in names.split():
            if name == "others":
                yield from (family for family in preset_families() if family not in shown)
            else:
                yield name

    return BLOCK.sub(lambda found: f"{found[1]}{table(list(families(found[2])))}{found[3]}", page)


def main() -> int:
    """Rewrites the page; with --check, fails if it is not current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is not current")
    arguments = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    new = updated(text)
    if arguments.check:
        if new != text:
            print("docs/models.md is not current: run python tools/preset_tables.py", file=sys.stderr)
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
