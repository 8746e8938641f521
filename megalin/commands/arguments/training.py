"""Arguments of the commands about a run's training: train, sweep, config, verify."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.commands.arguments.command import Command, Output


def _train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a config file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="dotted overrides, for example train.steps=100"
    )
    parser.add_argument(
        "--folder", type=Path, help="run folder (runs/<name of the config file>); an existing run is resumed"
    )
    parser.add_argument(
        "--no-memory-check", action="store_true", help="start even if the estimated memory exceeds that of the GPUs"
    )


def _launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc-per-node", type=int, required=True, metavar="N", help="ranks on this host: one a GPU, or on the CPU"
    )
    restarts = "start all ranks again after a failure, at most M times (0), from the newest valid checkpoint"
    parser.add_argument("--max-restarts", type=int, default=0, metavar="M", help=restarts)
    _train(parser)


def _quickstart(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to its config, as train.steps=1000")
    share = "use only this fraction of the text, the sources and help of this Python (1)"
    parser.add_argument("--corpus-share", type=float, metavar="X", help=share)


def _sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", type=Path, help="a sweep's file, such as examples/tasks/mqar_sweep.toml")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the runs; started again, it goes on")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time (1); GPUs are shared among them")
    limit = "then save and end the runs in progress; no run starts that would not end in time"
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help=limit)
    restart = "remove the runs that an edit of the sweep's files changes, and start them from scratch (else refused)"
    parser.add_argument("--restart-changed", action="store_true", help=restart)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown, after each result")


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="a config file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="dotted overrides, for example train.steps=100"
    )
    schema = "print the JSON schema of config files, for editors; a file names it by a first line #:schema PATH"
    parser.add_argument("--schema", action="store_true", help=schema)


def _verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a preset or a config file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="model.*, parallel.* or train.recompute")
    parser.add_argument(
        "--world-size",
        type=int,
        help="ranks of the mesh; those beyond tp x cp x pp are data parallel (tp x cp x pp, or those of the launcher)",
    )
    parser.add_argument(
        "--dtype",
        choices=["float64", "float32", "bfloat16", "float16", "float8"],
        default="float64",
        help='compute dtype (float64); float8: train.matmul_dtype = "float8", fp64 around its operands',
    )
    parser.add_argument("--length", type=int, help="tokens per sequence (a few chunks and a remainder)")
    parser.add_argument("--full", action="store_true", help="verify the model at full size, not shrunk")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--self-test", action="store_true", help="plant faults; each must be found (tp, dp >= 2, cp >= 3 or pp >= 2)"
    )
    kind.add_argument(
        "--grid",
        action="store_true",
        help="every mesh with axes of 1 to 4 ranks and at most --world-size (4, or those of the launcher) in all",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


QUICKSTART = Command(
    "quickstart",
    "train a small model on this machine's own text, evaluate it and generate: a few minutes on two cores",
    _quickstart,
    "quickstart",
    """\
megalin quickstart
megalin quickstart train.steps=1000 --corpus-share 0.5

It writes quickstart-data/ and runs/quickstart/ in the current folder.""",
    adopts_launcher=False,
    prints_result=False,
)
TRAIN = Command(
    "train",
    "train a model, or resume a run",
    _train,
    "train",
    """\
megalin train run.toml --folder runs/mine
megalin train run.toml train.steps=100 optimizer.lr=1e-3
torchrun --nproc-per-node 8 -m megalin train run.toml parallel.tp=2

Several ranks on one host: megalin launch.""",
    is_preemptible=True,
    takes_mixers=True,
    prints_result=False,
    outputs={"--folder": Output.FOLDER},
)
LAUNCH = Command(
    "launch",
    "train on several ranks of this host, which it starts, watches and restarts",
    _launch,
    "launch",
    """\
megalin launch --nproc-per-node 8 run.toml --folder runs/mine parallel.tp=2
megalin launch --nproc-per-node 8 run.toml --max-restarts 3

SIGTERM or Ctrl-C: all ranks save and end (exit code 75); a second one ends them at once.
Over several hosts use torchrun, srun or mpirun.""",
    adopts_launcher=False,
    takes_mixers=True,
    prints_result=False,
    outputs={"--folder": Output.FOLDER},
)
SWEEP = Command(
    "sweep",
    "train the runs of a sweep, several at a time, and compare them",
    _sweep,
    "sweep",
    "megalin sweep examples/tasks/mqar_sweep.toml --folder runs/mqar --processes 4 --markdown mqar.md",
    takes_mixers=True,
    prints_result=False,
    outputs={"--folder": Output.FOLDER, "--markdown": Output.FILE},
)
CONFIG = Command(
    "config",
    "print the resolved config, or the schema of config files for editors",
    _config,
    "config",
    """\
megalin config run.toml
megalin config run.toml train.steps=100 > resolved.toml
megalin config --schema > megalin.schema.json""",
    takes_mixers=True,
)
VERIFY = Command(
    "verify",
    "compare a training step on a mesh with the same step in one process",
    _verify,
    "verify",
    """\
megalin verify transnormerllm-1b-64k parallel.tp=2 --world-size 4
megalin verify run.toml parallel.cp=3 train.recompute=true --dtype bfloat16
megalin verify hgrn2-1b parallel.pp=2 parallel.pp_schedule=interleaved parallel.pp_stages_per_rank=2
megalin verify run.toml parallel.cp=3 --self-test
megalin verify run.toml --grid --world-size 8
torchrun --nproc-per-node 4 -m megalin verify run.toml parallel.tp=2

A config file gives the model, the mesh and train.recompute; its other keys are not read.""",
    takes_mixers=True,
)
