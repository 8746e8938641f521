"""All commands, in the groups and the order of the help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megalin.commands.arguments import corpora, interchange, models, results, shards, shell, training
from megalin.commands.arguments.command import Command

DATA: Mapping[str, Sequence[Command]] = {
    "text": (corpora.CLEAN, corpora.DEDUPLICATE, corpora.SCORE, corpora.TRAIN_TOKENIZER, corpora.PREPROCESS),
    "shards": (shards.INSPECT, shards.MERGE, shards.GENERATE_TASK),
    "from elsewhere": (shards.IMPORT_TOKENS, shards.GET_EVALUATION_DATA, shards.IMPORT_CONFIG),
}
"""The commands of `megalin data`."""
DATA_HELP = "make training data: clean text, train a tokenizer, write and inspect token shards, generate tasks"
GROUPS: Mapping[str, Sequence[Command]] = {
    "train": (
        training.QUICKSTART,
        training.TRAIN,
        training.LAUNCH,
        training.SWEEP,
        training.CONFIG,
        training.VERIFY,
    ),
    "use and judge a run": (
        results.EVAL,
        results.LM_EVAL,
        results.GENERATE,
        results.DOCTOR,
        results.REPORT,
        results.INSPECT,
    ),
    "models and hardware": (models.PARAMS, models.PLAN, models.COORDINATE_CHECK),
    "scaling laws and papers": (models.LADDER, models.FIT, models.REPRODUCE),
    "other libraries": (interchange.EXPORT, interchange.IMPORT),
    "shell": (shell.COMPLETION,),
}
"""The commands of `megalin` itself; `megalin data` stands with the first group."""
