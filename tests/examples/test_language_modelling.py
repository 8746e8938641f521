"""The comparison of language models: its sweep, and the collector of its corpus on small packages."""

from __future__ import annotations

import gzip
import importlib.util
import io
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from megalin.model.build import make_model
from megalin.sweep.order import groups, read_sweep
from megalin.train.config import load_run_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "language_modelling"


@pytest.fixture(scope="module")
def collector() -> ModuleType:
    spec = importlib.util.spec_from_file_location("collect_packages", EXAMPLE / "collect_packages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "models", "smallest", "largest"),
    [("compare_25m", 10, 25.5e6, 26.5e6), ("encoder_lengths", 2, 19.4e6, 19.5e6)],
)
def test_models_have_about_the_same_size_and_steps_the_same_tokens(name, models, smallest, largest):
    sweep = read_sweep(EXAMPLE / f"{name}.toml")
    sizes, tokens = {}, set()
    for cells in groups(sweep):
        config = load_run_config(sweep.run_config, cells[0].overrides)
        model = make_model(config.model)
        sizes[cells[0].values["model"]] = model.num_parameters() - model.num_embedding_parameters()
        tokens.add(config.train.global_batch_size * config.data.sequence_length)
    assert len(sizes) == models
    assert {model: size for model, size in sizes.items() if not smallest < size < largest} == {}
    assert len(tokens) == 1


def write(folder: Path, name: str, data: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_package_becomes_documents_of_its_text(tmp_path, collector):
    page = b"<head><title>t</title></head><body><p>One &amp; <b>two</b></p><script>x</script>\n\n\n<p>three</p></body>"
    write(tmp_path, "p/usr/page.html", page)
    write(tmp_path, "p/usr/man.gz", gzip.compress("caf\u00e9".encode()))
    write(tmp_path, "p/usr/words.dz", gzip.compress(b"a\n\n" + b"b" * collector.DICTIONARY_BYTES + b"\n\nc\n\nd"))
    (tmp_path / "p" / "usr" / "link.gz").symlink_to("man.gz")
    with tarfile.open(tmp_path / "p" / "all.tar.xz", "w:xz") as archive:
        for name in ("linux/doc/a.rst", "linux/b.c"):
            member = tarfile.TarInfo(name)
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))

    def texts(*paths: str, **fields: str | int) -> list[str]:
        source = collector.Source("p", list(paths), **{"format": "text", "license": "x"} | fields)
        return [document.text for document in collector.documents(source, tmp_path)]

    assert texts("usr/*.html", format="html") == ["One & two\n\nthree\n"]
    assert texts("usr/*.gz") == ["caf\u00e9"]
    parts = texts("usr/*.dz", format="dictionary")
    assert [len(part) for part in parts] == [3 + collector.DICTIONARY_BYTES + 2, 4]
    assert texts("*/doc/*.rst", archive="all.tar.xz") == ["linux/doc/a.rst"]
    assert len(texts("usr/*.dz", format="dictionary", max_bytes=10)) <= 1
    with pytest.raises(ValueError, match=r"p has no file usr/x; is it the version of Debian 12\?"):
        texts("usr/x")
    with pytest.raises(ValueError, match="p: format = 'pdf': use text, html or dictionary"):
        texts("usr/*.gz", format="pdf")


def test_corpus_names_its_licences(tmp_path, collector, monkeypatch, capsys):
    write(tmp_path, "packages/p/usr/a.txt", b"text of a package")
    sources = tmp_path / "corpus.toml"
    sources.write_text('[[sources]]\npackage = "p"\npaths = ["usr/*"]\nformat = "text"\nlicense = "GPL"\n')
    monkeypatch.setattr(collector, "sources", lambda _: [collector.Document("s", "source")])
    monkeypatch.setattr(collector, "help_topics", lambda: [])
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path), "--sources", str(sources)])
    assert collector.main() == 0
    assert "p: GPL; usr/share/doc/p/copyright" in (tmp_path / "LICENSE.txt").read_text()
    written = (tmp_path / "train.jsonl").read_text() + (tmp_path / "held-out.jsonl").read_text()
    assert "text of a package" in written
    assert "Python's standard library" in capsys.readouterr().out
