"""Arguments of the commands about models without a run: params, plan, coordinate-check, ladder, fit, reproduce."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.commands.arguments.choices import GPUS
from megalin.commands.arguments.command import Command, Output


def _params(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a preset or a config file; without it the presets are listed")
    parser.add_argument("overrides", nargs="*", metavar="model.key=value", help="changes to the model")
    length = "tokens per sequence, for the number of operations (data.sequence_length of the config file, else 8192)"
    parser.add_argument("--length", type=int, help=length)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a preset, or a config file of a model or a run")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the config, for example model.vocab_size=1"
    )
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs of the run")
    parser.add_argument("--gpu", default="h200", help=f"GPU model: {', '.join(GPUS)} (h200)")
    add = parser.add_argument
    add("--gpu-memory", "--memory", help="memory of one GPU, for example 80GB or 75GiB (that of the GPU model)")
    add("--gpu-tflops", type=float, metavar="X", help="dense bf16 rate of another GPU, TFLOP/s")
    add("--bandwidth", type=float, metavar="X", help="memory bandwidth of another GPU, GB/s")
    add("--link-bandwidth", type=float, metavar="X", help="to other GPUs of its host in one direction, GB/s")
    add("--network-bandwidth", type=float, metavar="X", help="to other hosts in one direction, GB/s")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--length", type=int, help="tokens per sample (the run's, or 8192)")
    length.add_argument(
        "--longest", action="store_true", help="find the longest samples that fit, on each mesh, instead of the fastest"
    )
    parser.add_argument(
        "--global-batch-size", type=int, help="samples per step over all GPUs (the run's, or 4 per GPU)"
    )
    parser.add_argument(
        "--eager", action="store_true", help="do not compile blocks (default: as in the run, or compiled)"
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="only layouts with sequence parallelism in tp groups"
    )
    parser.add_argument("--top", type=int, default=5, help="number of layouts to print (5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every rejected layout")


def _coordinate_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a preset, or a config file of a model or a run")
    parser.add_argument("overrides", nargs="*", metavar="model.key=value", help="changes to the model")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256], help="widths (32 64 128 256)")
    parser.add_argument("--steps", type=int, default=4, help="steps of AdamW before the measurement (4)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate at every width (1e-3)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _ladder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ladder", type=Path, help="a ladder's file, such as examples/scaling_laws/tiny.toml")
    parser.add_argument("--folder", type=Path, help="folder of the runs (runs/<name of the file>); it goes on there")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--dry-run", action="store_true", help="print the plan with FLOPs, hours and memory, and end")
    shown.add_argument("--status", action="store_true", help="print the state of every run, and end")
    parser.add_argument("--rung", type=int, action="append", metavar="K", help="only this rung of the plan; repeatable")
    parser.add_argument("--mixer", action="append", metavar="NAME", help="only this mixer; repeatable")
    parser.add_argument("--processes", type=int, default=1, help="rungs at a time (1); GPUs are shared among them")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--budget", type=float, metavar="FLOPS", help="only the smallest sizes that fit these FLOPs")
    budget.add_argument("--gpu-hours", type=float, metavar="H", help="only the smallest sizes that fit, by the planner")
    parser.add_argument("--gpu", default="h100", help=f"GPU of the planner's hours: {', '.join(GPUS)} (h100)")


def _fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="folders of runs, or folders that hold some")
    parser.add_argument(
        "--points",
        type=Path,
        metavar="CSV",
        help="losses instead of runs: columns parameters (without embeddings), tokens, loss (nats a token) and, if "
        "known, flops (left out: 6 N D), mixer, state_bytes, run",
    )
    parser.add_argument(
        "--counts",
        choices=("model", "paper"),
        default="model",
        help="counts of the runs' parameters and FLOPs: the model's own, or Table 1 of the scaling-laws paper (model)",
    )
    parser.add_argument("--force", action="store_true", help="accept runs that differ in tokenizer, data or schedule")
    parser.add_argument(
        "--ask", metavar="BUDGET", help="best model for 1e21 FLOPs, or for '1000 h100-hours' at the planner's MFU"
    )
    parser.add_argument("--mfu", type=float, help="MFU for --ask in GPU-hours (the planner's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--png", type=Path, metavar="DIR", help="write the figures into this folder")
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write figures and numbers as one HTML page")
    parser.add_argument("--resamples", type=int, default=200, help="resamples of the bands (200)")


def _reproduce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paper", nargs="?", help="a paper; without it, all papers and tables are listed")
    parser.add_argument("table", nargs="?", help="one of its tables; without it, they are listed")
    parser.add_argument(
        "--runs",
        nargs="+",
        default=[],
        metavar="RUN",
        help="run folders for the numbers of quality: RUN goes to the row with its model, ROW=RUN to that row",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


PARAMS = Command(
    "params",
    "count a model's parameters, operations and state",
    _params,
    "params",
    """\
megalin params
megalin params hgrn2-1b --length 32768
megalin params run.toml model.hidden_size=1024 --json""",
    takes_mixers=True,
)
PLAN = Command(
    "plan",
    "find the layouts of a model that fit the GPUs, with memory and step time",
    _plan,
    "plan",
    """\
megalin plan transnormerllm-7b-64k --gpus 64 --gpu h100
megalin plan run.toml --gpus 8 --top 3
megalin plan run.toml --gpus 4 --gpu-memory 48GB --gpu-tflops 181 --bandwidth 864 --link-bandwidth 25
megalin plan hgrn2-1b --gpus 16 --longest""",
    takes_mixers=True,
)
COORDINATE_CHECK = Command(
    "coordinate-check",
    "measure how activations and their updates grow with a model's width",
    _coordinate_check,
    "coordinate_check",
    "megalin coordinate-check tnl-70m --widths 64 128 256 --png growth.png",
    takes_mixers=True,
    outputs={"--png": Output.FILE},
)
LADDER = Command(
    "ladder",
    "train the runs of a scaling-law ladder, or plan it",
    _ladder,
    "ladder",
    """\
megalin ladder examples/scaling_laws/tiny.toml --dry-run
megalin ladder examples/scaling_laws/tiny.toml --processes 2
megalin ladder examples/scaling_laws/ladder.toml --mixer TNL --gpu-hours 0.5
megalin ladder examples/scaling_laws/ladder.toml --status""",
    prints_result=False,
)
FIT = Command(
    "fit",
    "fit scaling laws to measured losses, and predict from them",
    _fit,
    "fit",
    """\
megalin fit runs/ladder --html laws.html
megalin fit --points losses.csv --ask 1e21
megalin fit runs/ladder --ask '1000 h100-hours'""",
    takes_mixers=True,
    outputs={"--png": Output.FOLDER, "--html": Output.FILE},
)
REPRODUCE = Command(
    "reproduce",
    "print a paper's table beside our numbers, counted or from run folders",
    _reproduce,
    "reproduce",
    """\
megalin reproduce
megalin reproduce scaling-laws
megalin reproduce hgrn2 3 --runs runs/hgrn2-385m""",
    takes_mixers=True,
)
