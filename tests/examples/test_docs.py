"""Checks of the documentation: links, paths, commands, the README's figures and blocks, the mixer of a page."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalin.commands.arguments.parser import build_parser
from megalin.errors import ConfigError
from megalin.layers.config import mixer_class
from megalin.train.config import load_run_config
from megalin.train.launch_checks import check_launch
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


def _blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a page."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/your-text.md"])
def test_configs_of_pages_are_valid(page, tmp_path):
    (text,) = (text for language, text in _blocks(ROOT / page) if language == "toml")
    (tmp_path / "mine.toml").write_text(text)
    config = load_run_config(tmp_path / "mine.toml", ["parallel.tp=2"])
    assert config.data.tokenizer == "shards/tokenizer.json"


RANKS = re.compile(r"(?:-nproc-per-node|--num_accelerators|run -n|-ppn \d+ -n) (\d+) .*?megalin train (mine\.toml.*)")
HOSTS = re.compile(r"--nnodes (\d+)")


@pytest.mark.parametrize(
    ("page", "config"),
    [("README.md", "README.md"), ("docs/tutorials/several-gpus.md", "docs/tutorials/your-text.md")],
)
def test_launches_of_pages_fit_their_config(page, config, tmp_path):
    """The config that the reader has by then, on the number of ranks of each line."""
    (tmp_path / "mine.toml").write_text(next(text for language, text in _blocks(ROOT / config) if language == "toml"))
    lines = (ROOT / page).read_text("utf-8").replace("\\\n", " ").splitlines()
    launches = [(line, *found.groups()) for line in lines if (found := RANKS.search(line))]
    assert len(launches) >= 3
    for line, ranks, command in launches:
        hosts = HOSTS.search(line)
        overrides = shlex.split(command, comments=True)[1:]
        config = load_run_config(tmp_path / "mine.toml", overrides)
        check_launch(config, int(ranks) * (1 if hosts is None else int(hosts[1])))


EXAMPLES = re.compile(r"^(?!.*nproc).*megalin train (examples/\S+\.toml.*)$", re.MULTILINE)
"""A training of a config of examples/ in one process."""


def test_trainings_of_example_configs_fit_one_process():
    found = [line for page in PAGES for line in EXAMPLES.findall(page.read_text("utf-8").replace("\\\n", " "))]
    assert len(found) >= 5
    for command in found:
        config, *rest = shlex.split(command, comments=True)
        overrides = [word for word in rest if re.match(r"[a-z_]+\.[\w.]+=", word)]
        check_launch(load_run_config(ROOT / config, overrides), 1)


COMMAND = re.compile(r"^(?: {4})?(?:[^`|\n]*? )?(?:python -m )?(megalin (?:\\\n|[^#\n])*)", re.MULTILINE)
"""A command of a code block, under any launcher, with its continued lines."""


def _commands(page: Path) -> list[str]:
    text = page.read_text("utf-8")
    code = "".join(re.findall(r"^(?: {4}.*\n)+", text, re.MULTILINE)) + "".join(
        x for y, x in _blocks(page) if y == "sh"
    )
    return [found.replace("\\\n", " ") for found in COMMAND.findall(code)]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_commands_of_pages_parse(page, capsys):
    """Options and commands exist; values in capitals and brackets stand for others."""
    parser = build_parser()
    for command in _commands(page):
        if re.search(r"\[|\||\.\.\.", command) or page.is_relative_to(ROOT / "docs/benchmarks"):
            continue
        words = [re.sub(r"^[A-Z]+$", "1", word) for word in shlex.split(command)[1:]]
        _, rest = parser.parse_known_args(words)
        assert [word for word in rest if word.startswith("-")] == [], command


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_blocks_of_the_readme_run_in_an_empty_folder(tmp_path):
    """Those marked sh and python, in order; the one marked toml is the file that the text names."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MEGALIN_CACHE": str(tmp_path / "cache"),
    }
    ran = []
    for language, text in _blocks(ROOT / "README.md"):
        if language == "toml":
            (tmp_path / "mine.toml").write_text(text)
            continue
        command = ["bash", "-euo", "pipefail", "-c", text] if language == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        ran.append(language)
    assert ran.count("sh") >= 3
    assert "python" in ran


def _table(text: str, head: str) -> list[list[str]]:
    """Cells of the rows of the table whose head begins so."""
    rows = text.partition(f"\n| {head}")[2].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_figures_of_the_readme_are_those_of_their_pages():
    readme = (ROOT / "README.md").read_text()
    results = (ROOT / "docs/results/2026-11-25-h100-language-models.md").read_text()
    encoders = (ROOT / "docs/results/2026-11-25-h100-encoders.md").read_text()
    steps = (ROOT / "docs/benchmarks/2026-11-26-h200-float8.md").read_text()
    speeds = [[row[0], *re.findall(r"[\d.]+k", " ".join(row[1:3]))] for row in _table(steps, "model | bf16 | FP8 |")]
    losses = {row[0].split(" (")[0]: row[2].strip("*") for row in _table(results, "model | rate | held-out loss |")}
    states = {row[0].split(" (")[0]: row[3] for row in _table(results, "model | parameters without embedding |")}
    rows = _table(readme, "model | presets |")
    assert len(rows) == 12
    for name, presets, loss, state, *speed in rows:
        model = name.split(" (")[0]
        assert (loss, state) == (losses.get(model, ""), states.get(model, "")), name
        family = presets.split("-*")[0].strip("`")
        measured = [speed for preset, *speed in speeds if re.match(rf"{family}-1(\.\d)?b", preset)]
        assert [speed] == (measured or [["", ""]]), name
    masked = re.findall(r"(DANet|BERT) (\d\.\d+)", readme)
    assert masked == [(row[1], row[3].strip("*")) for row in _table(encoders, "length | model | rate |")[:2]]
    for claim, text, source in _table(readme, "| figure | source |"):
        page = ROOT / re.search(r"\(([^)#]*)", source)[1]
        for number in re.findall(r"\d+\.\d+|\d+e-\d+", text):
            if claim != "a trained result" or number != "3.8":  # of 3,842,048 bytes
                assert number in page.read_text(), f"{number} is not in {page.name}"


def test_a_mixer_of_another_package_without_its_class_is_refused(tmp_path, monkeypatch):
    (tmp_path / "package_of_mixers").mkdir()
    (tmp_path / "package_of_mixers" / "nameless.py").write_text("CONFIG = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"this module has no MIXER; set MIXER to the class of its mixer"):
        mixer_class("package_of_mixers.nameless")


def test_mixer_of_the_page_continues_from_its_state_and_decodes(tmp_path, monkeypatch):
    """The forward of a full sequence equals two forwards that pass the state, and decoding token by token."""
    page = (ROOT / "docs/adding-a-mixer.md").read_text()
    config, mixer, derived = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    folder, place = tmp_path / "mixers_of_pages", "megalin.layers.mixer_configs.ema import "
    folder.mkdir()
    (folder / "ema_config.py").write_text(config.replace('"ema"', '"mixers_of_pages.ema"'))
    assert place in mixer
    (folder / "ema.py").write_text(mixer.replace(place, "mixers_of_pages.ema_config import CONFIG, "))
    (folder / "capped_tnl.py").write_text(derived.replace("my_mixers", "mixers_of_pages"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("ema", "capped_tnl"):
        importlib.import_module(f"mixers_of_pages.{name}")  # as its author's program does
    mixers = [{"type": f"mixers_of_pages.{name}", "num_heads": 4, "chunk_size": 16} for name in ("ema", "capped_tnl")]
    built = build(model({"sublayers": [*mixers, GLU]}))
    assert [context.decoding for context in built.step_contexts().blocks[0]] == ["step", "step", "add_step"]
    tokens = make_inputs().tokens
    state = built.initial_state(len(tokens), dtype=torch.float64)
    expected = built(tokens, state=state).logits
    first = built(tokens[:, :19], state=state)
    torch.testing.assert_close(built(tokens[:, 19:], state=first.state).logits, expected[:, 19:])
    decoded = first
    for position in range(19, 23):
        decoded = built.step(tokens[:, position], decoded.state)
        torch.testing.assert_close(decoded.logits[:, 0], expected[:, position])
