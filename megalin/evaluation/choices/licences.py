"""Licence notes of the data sets in the evaluation data, as their authors publish them."""

from __future__ import annotations

UNKNOWN = "no note here; read the page of the data set before you redistribute it"

_LICENCES = {
    "EleutherAI/drop": "CC BY-SA 4.0",
    "EleutherAI/hendrycks_math": "MIT",
    "EleutherAI/lambada_openai": "modified MIT (OpenAI's copy of LAMBADA, whose original is CC BY 4.0)",
    "HuggingFaceH4/MATH-500": "MIT (a part of hendrycks_math)",
    "ai2_arc": "CC BY-SA 4.0",
    "allenai/squad": "CC BY-SA 4.0",
    "commonsense_qa": "MIT",
    "futurehouse/lab-bench": "CC BY-SA 4.0",
    "google-research-datasets/mbpp": "CC BY 4.0",
    "google-research-datasets/nq_open": "CC BY-SA 3.0",
    "gsm8k": "MIT",
    "hellaswag": "MIT",
    "openai_humaneval": "MIT",
    "sciq": "CC BY-NC 3.0: not for commercial use",
    "super_glue": "of each part; BoolQ, the part used here: CC BY-SA 3.0",
    "winogrande": "CC BY 4.0",
}


def licence_note(data_set: str) -> str:
    """Note on the licence of a data set, by its name on the Hugging Face hub. It is information, not legal advice."""
    return _LICENCES.get(data_set, UNKNOWN)
