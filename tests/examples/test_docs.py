"""Checks of the documentation: links, paths, the README's config, and the mixer of adding-a-mixer.md."""

import re
from pathlib import Path

import pytest
import torch

from megalin.train.config import load_run_config
from tests.cases import GLU, build, make_inputs, model

ROOT = Path(__file__).parents[2]
PLACEHOLDER = re.compile(r"\b(TYPE|FAMILY|ROOM|(test_)?OP|X)\b")
"""A name in capitals that stands for another."""
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_inside_the_repository_exist(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    for target, anchor in links:
        linked = page.parent / target
        assert linked.exists(), f"{target} does not exist"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{target} has no section {anchor}"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_files_named_by_path_exist(page):
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:megalin|csrc|tests|tools|docs|examples)/[\w./-]+\.\w+)`", text)
    names = [path for path in paths if not PLACEHOLDER.search(path)]
    assert [path for path in names if not (ROOT / path).exists()] == []


def test_config_of_the_readme_is_valid(tmp_path):
    (text,) = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.toml").write_text(text)
    config = load_run_config(tmp_path / "mine.toml", ["parallel.tp=2"])
    assert config.data.tokenizer == "shards/tokenizer.json"


def test_mixer_of_the_page_continues_from_its_state_and_decodes(tmp_path, monkeypatch):
    """The forward of a full sequence equals two forwards that pass the state, and decoding token by token."""
    page = (ROOT / "docs/adding-a-mixer.md").read_text()
    (text,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "mixers_of_pages").mkdir()
    (tmp_path / "mixers_of_pages" / "ema.py").write_text(text.replace('"ema"', '"mixers_of_pages.ema"'))
    monkeypatch.syspath_prepend(str(tmp_path))
    built = build(model({"sublayers": [{"type": "mixers_of_pages.ema", "num_heads": 4, "chunk_size": 16}, GLU]}))
    tokens = make_inputs().tokens
    state = built.initial_state(len(tokens), dtype=torch.float64)
    expected = built(tokens, state=state).logits
    first = built(tokens[:, :19], state=state)
    torch.testing.assert_close(built(tokens[:, 19:], state=first.state).logits, expected[:, 19:])
    decoded = first
    for position in range(19, 23):
        decoded = built.step(tokens[:, position], decoded.state)
        torch.testing.assert_close(decoded.logits[:, 0], expected[:, position])
