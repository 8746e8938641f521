"""Licence notes of the data sets in the evaluation data.

The wheel itself has the licence of its code alone (Apache-2.0); the field `license` of its data sets is empty.
"""

from __future__ import annotations

UNKNOWN = "no note here; read the page of the data set before you redistribute it"

_STATED = {
    "EleutherAI/hendrycks_math": "MIT, by the LICENSE of the authors' repository hendrycks/math",
    "HuggingFaceH4/MATH-500": "a part of hendrycks_math, which is MIT by the LICENSE of hendrycks/math",
    "ai2_arc": "CC BY-SA 4.0, by the card of allenai/ai2_arc",
    "google-research-datasets/mbpp": "CC BY 4.0, by the README of google-research, for all data sets there",
    "google-research-datasets/nq_open": "CC BY-SA 3.0, by the README of natural-questions/nq_open",
    "super_glue": "of each part; BoolQ, the part used here: CC BY-SA 3.0, by the README of boolean-questions",
    "winogrande": "CC BY (no version given), by the README of allenai/winogrande",
}
"""Licences that were read in the place that the note names."""

_REPORTED = {
    "EleutherAI/drop": "CC BY-SA 4.0",
    "EleutherAI/lambada_openai": "modified MIT for OpenAI's copy and CC BY 4.0 for the original LAMBADA",
    "allenai/squad": "CC BY-SA 4.0",
    "commonsense_qa": "MIT",
    "futurehouse/lab-bench": "CC BY-SA 4.0",
    "gsm8k": "MIT",
    "hellaswag": "MIT",
    "openai_humaneval": "MIT",
    "sciq": "CC BY-NC 3.0, not for commercial use",
}
"""Licences under which the data sets are said to be released, without a source that was read."""


def licence_note(data_set: str) -> str:
    """Note on the licence of a data set, by its name on the Hugging Face hub. It is information, not legal advice."""
    if data_set in _REPORTED:
        return f"reported as {_REPORTED[data_set]}; not verified, read the authors' release before you redistribute it"
    return _STATED.get(data_set, UNKNOWN)
