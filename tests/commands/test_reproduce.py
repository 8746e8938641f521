"""`megalin reproduce`: lists, tables for people and as JSON."""

from __future__ import annotations

import json
import math

import pytest

from megalin.__main__ import main
from megalin.reproduce.papers import load_paper, paper_names


def test_without_a_table_papers_and_tables_are_listed(capsys):
    assert main(["reproduce"]) == 0
    text = capsys.readouterr().out
    assert main(["reproduce", "--json"]) == 0
    titles = json.loads(capsys.readouterr().out)
    assert list(titles) == paper_names()
    for name in paper_names():
        assert f"{name}: {load_paper(name).title}\n" in text
        assert titles[name] == {key: table.title for key, table in load_paper(name).tables.items()}
    assert main(["reproduce", "scaling-laws"]) == 0
    own = capsys.readouterr().out
    assert own in text
    assert "  7          Model parameters and FLOPs, without embeddings\n" in own


def test_table_for_people(capsys):
    assert main(["reproduce", "scaling-laws", "7"]) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if line.startswith("TNL-1B"))
    cells = [text for text in line.split("  ") if text]
    shape, counts = ["32 = 32", "1,536 = 1,536", "16 / 12", "5,632 / 4,096"], ["918.6 = 918.55", "22.3 = 22.27"]
    assert [cell.strip() for cell in cells] == ["TNL-1B", *shape, *counts]
    assert "144 published numbers, 144 of ours" in text
    assert main(["reproduce", "scaling-laws", "4"]) == 0
    text = capsys.readouterr().out
    assert "without ours (LLaMA 0.07B, TNL 0.07B, HGRN2 0.07B and 21 more): SCROLLS is not among the suites" in text
    assert main(["reproduce", "scaling-laws", "5"]) == 0
    assert " 53.20 " in capsys.readouterr().out  # printed so; TOML loses the zero


def test_table_as_json(capsys):
    assert main(["reproduce", "scaling-laws", "7", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["paper"], table["table"]) == ("scaling-laws", "7")
    cell = next(c for c in table["cells"] if (c["row"], c["column"]) == ("LLaMA-70M", "parameters"))
    assert cell.pop("ours") == 20.460544
    assert cell == {
        "row": "LLaMA-70M",
        "run": None,
        "column": "parameters",
        "unit": "million, without embeddings",
        "published": 20.5,
        "reason": "",
        "equal": True,
    }


@pytest.mark.slow
def test_losses_of_a_trained_run(run, capsys):
    assert main(["eval", str(run)]) == 0
    capsys.readouterr()
    assert main(["reproduce", "transnormerllm", "1", "--json", "--runs", f"Transformer 1B={run}"]) == 0
    cells = {c["column"]: c for c in json.loads(capsys.readouterr().out)["cells"] if c["row"] == "Transformer 1B"}
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    mean = sum(losses) / len(losses)
    assert cells["loss"]["ours"] == pytest.approx(mean / math.log(2), rel=1e-12)
    assert cells["PPL"]["ours"] == pytest.approx(math.exp(mean), rel=1e-12)
    assert main(["reproduce", "rodimus", "6", "--runs", f"Mamba={run}"]) == 0
    stored = json.loads(next((run / "evaluations").glob("step-*.json")).read_text())["suites"]["loss"]
    assert f"6.19 / {stored['validation']['perplexity']:,.3f}\n" in capsys.readouterr().out


def test_unknown_paper_is_an_error_of_the_user(capsys):
    assert main(["reproduce", "rodimuss", "8"]) == 2
    assert "there is no such paper here" in capsys.readouterr().err
