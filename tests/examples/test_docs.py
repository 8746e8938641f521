"""What the documents say that a machine can check: their links, and the config that the README shows."""

import re
from pathlib import Path

import pytest

from megalin.train.config import load_run_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_inside_the_repository_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    for target, anchor in links:
        linked = page.parent / target
        assert linked.exists(), f"{target} does not exist"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{target} has no section {anchor}"


def test_config_of_the_readme_is_valid(tmp_path):
    (text,) = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.toml").write_text(text)
    config = load_run_config(tmp_path / "mine.toml", ["parallel.tp=2"])
    assert config.data.tokenizer == "shards/tokenizer.json"
