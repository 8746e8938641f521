"""Values that options take, equal to the library's (a test compares them); to import those would import torch."""

DTYPES = ("bfloat16", "float16", "float32")
"""Compute dtypes: `megalin.train.compute_dtypes.COMPUTE_DTYPES`."""
SPLITS = ("train", "validation", "test")
"""Splits of the data: `megalin.data.config.SPLITS`."""
SUITES = ("loss", "choices", "positions", "recall", "state-tracking", "needle", "ruler")
"""Suites: `megalin.commands.eval.SUITES`."""
CHOICE_TASKS = "common_sense"
"""Default of --tasks: `megalin.evaluation.choices.suite.DEFAULT_TASKS`."""
NUM_DEPTHS = 11
"""Default of --depths: `megalin.evaluation.generated.retrieval.NUM_DEPTHS`."""
HAYSTACKS = ("noise", "documents")
"""Texts around needles: `megalin.evaluation.generated.haystack.HAYSTACKS`."""
EXPORT_FORMATS = ("codefuse", "fla", "opennlplab", "transformers")
"""Formats of exported folders: `megalin.interop.weights.layouts.FORMATS`."""
GPUS = ("a100", "h100", "h200", "b200")
"""GPU models: `megalin.planner.hardware.HARDWARE`."""
RULES = ("fix-text", "special-characters", "html", "urls", "garbled", "repeated-punctuation", "numbers", "blanks")
"""Rules that clean a corpus: `megalin.data.corpus.rules.RULES`."""
MQAR_SETTINGS = ("2023", "2026")
"""Settings of the task mqar: `megalin.evaluation.tasks.mqar.MQAR_SETTINGS`."""
TOKENIZERS = (
    *("HuggingFaceTokenizer", "GPT2BPETokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer"),
    *("TikTokenizer", "ByteTokenizer"),
)
"""Megatron's names of tokenizers: `megalin.commands.data.preprocess.TOKENIZERS`."""
DOCUMENT_BYTES = 16 << 20
"""Default of --max-document-bytes."""
TOKEN_FORMATS = ("raw", "llm.c", "npy", "datatrove")
"""Formats of token files: `megalin.data.shards.token_files.Format`."""
RAW_DTYPES = ("uint16", "uint32", "int32", "int64")
"""Dtypes of raw token files: `megalin.data.shards.token_files.RAW_DTYPES`."""
