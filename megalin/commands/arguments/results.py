"""Arguments of the commands that use a trained run: eval, lm-eval, generate, inspect, doctor, report."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.commands.arguments.choices import CHOICE_TASKS, DTYPES, HAYSTACKS, NUM_DEPTHS, SPLITS, SUITES
from megalin.commands.arguments.command import Command, Output, add_step_options

TEMPERATURE = 0.8
"""Default temperature. Greedy text soon repeats itself, and a temperature of 1 draws unlikely tokens too often."""


def _eval(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, help="a run folder")
    add("overrides", nargs="*", metavar="key=value", help="for example parallel.cp=2 or data.validation=['a']")
    suites = f"suites, with commas between: {', '.join(SUITES)} (those of --tasks SUITE:TASK; else loss)"
    add("--suite", metavar="NAMES", help=suites)
    add("--split", choices=SPLITS, default="validation", help="split of loss, positions and documents (validation)")
    tasks = f"choice tasks: a group, TASK or TASK/VARIANT ({CHOICE_TASKS}); SUITE:TASK of any suite"
    add("--tasks", nargs="+", metavar="TASK", help=tasks)
    add("--data", type=Path, metavar="FOLDER", help="folder of the choice tasks (the run's evaluation.data)")
    add("--limit", type=int, metavar="N", help="only the first N questions or examples of each task")
    add("--lengths", type=int, nargs="+", metavar="L", help="context lengths of needle and ruler (1/4, 1/2, 1 of T)")
    add("--depths", type=int, metavar="N", help=f"depths of the needles ({NUM_DEPTHS})")
    haystack = "text around the needles: generated noise, or held-out documents of the run (noise)"
    add("--haystack", choices=HAYSTACKS, help=haystack)
    add_step_options(parser)
    add("--json", action="store_true", help="print one JSON object")


def _lm_eval(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, help="a run folder")
    add("overrides", nargs="*", metavar="key=value", help="parallel.tp=2: ranks that share the weights (1)")
    add("--tasks", nargs="+", required=True, metavar="TASK", help="lm-eval's tasks or groups, or patterns")
    add("--include-path", type=Path, metavar="FOLDER", help="folder with further task files (YAML)")
    add("--trust-task-code", action="store_true", help="let the files of --include-path run code, which they need")
    add("--no-default-tasks", action="store_true", help="know the tasks of --include-path only, which starts at once")
    add("--num-fewshot", type=int, metavar="N", help="examples before each question (the task's)")
    add("--limit", type=int, metavar="N", help="only the first N questions of each task")
    add("--gen-kwargs", metavar="K=V,...", help="generation arguments in place of the tasks'")
    add("--batch-size", type=int, default=16, help="texts that are generated together (16)")
    add("--max-length", type=int, metavar="N", help="tokens read at once (the run's data.sequence_length)")
    _add_special_tokens(parser, "texts (data.special_tokens, else those that tokenizer.json adds)")
    add("--step", type=int, metavar="N", help="the checkpoint after N steps (the newest one)")
    add("--dtype", choices=DTYPES, help="dtype of the weights (the run's train.dtype)")
    add("--output", type=Path, metavar="FILE", help="write lm-eval's results and every question's answers as JSON")
    add("--json", action="store_true", help="print one JSON object")


def _add_special_tokens(parser: argparse.ArgumentParser, texts: str) -> None:
    about = f"put the tokenizer's special ids, as BOS, around {texts}"
    parser.add_argument("--special-tokens", action=argparse.BooleanOptionalAction, help=about)


def _generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, help="a run folder")
    add("overrides", nargs="*", metavar="key=value", help="parallel.tp=2: ranks that share the weights (1)")
    source = parser.add_mutually_exclusive_group()
    text = "a text to continue (may be given again); without it and --prompts, standard input"
    source.add_argument("--prompt", action="append", help=text)
    source.add_argument(
        "--prompts", metavar="FILE", help='JSON Lines, a text as "prompt" in each; "-": from standard input'
    )
    _add_special_tokens(parser, "prompts (data.special_tokens, else not)")
    add("--output", type=Path, metavar="FILE", help="write JSON Lines there, in the order of the prompts")
    add("--batch-size", type=int, default=16, help="prompts decoded together (16)")
    add("--max-tokens", type=int, default=128, help="maximum number of tokens to generate for each prompt (128)")
    add("--temperature", type=float, default=TEMPERATURE, help=f"divides the logits ({TEMPERATURE}); 0: greedy")
    add("--top-k", type=int, help="sample from the k likeliest tokens")
    add("--top-p", type=float, help="sample from the likeliest tokens that together reach p")
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="divide positive logits of earlier tokens by X, multiply negative ones (1)",
    )
    add("--seed", type=int, default=0, help="seed of the sampling (0); each prompt's draws depend on its number alone")
    add_step_options(parser)
    add("--dtype", choices=DTYPES, help="dtype of the weights (the run's train.dtype)")


def _inspect(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, help="a run folder")
    add("overrides", nargs="*", metavar="key=value", help="for example data.validation=['a']")
    add("--step", type=int, metavar="N", help="the checkpoint after N steps (the newest one)")
    add("--samples", type=int, default=8, metavar="N", help="samples to read, the first ones of the split (8)")
    add("--split", choices=SPLITS, default="validation", help="split of the samples (validation)")
    add("--json", action="store_true", help="print one JSON object")
    add("--png", type=Path, metavar="DIR", help="folder of the figures (RUN/inspections/step-N)")


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run, finished or in progress")
    parser.add_argument(
        "--compare", type=Path, nargs="+", metavar="RUN", help="compare these runs: losses, evaluations, states"
    )
    parser.add_argument("--output", type=Path, help="file to write (RUN/report.html; with --compare: compare.html)")


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder of a run, ended or in progress")


EVAL = Command(
    "eval",
    "evaluate a run: held-out loss, and choice tasks with --suite choices",
    _eval,
    "eval",
    """\
megalin eval runs/mine
megalin eval runs/mine --suite loss,needle,recall --limit 100
megalin eval runs/mine --suite choices --data evaluation-data --all-steps --json
torchrun --nproc-per-node 4 -m megalin eval runs/mine parallel.cp=2""",
    takes_mixers=True,
)
LM_EVAL = Command(
    "lm-eval",
    "evaluate a run by tasks of the harness lm-eval",
    _lm_eval,
    "lm_eval",
    "megalin lm-eval runs/mine --tasks lambada_openai hellaswag --limit 200",
    takes_mixers=True,
    outputs={"--output": Output.FILE},
)
GENERATE = Command(
    "generate",
    "continue prompts with a trained run",
    _generate,
    "generate",
    """\
megalin generate runs/mine --prompt 'The first time' --max-tokens 200 --top-p 0.95
megalin generate runs/mine --prompts questions.jsonl --output answers.jsonl --temperature 0
torchrun --nproc-per-node 2 -m megalin generate runs/mine parallel.tp=2 --prompt 'Once'""",
    takes_mixers=True,
    outputs={"--output": Output.NEW_FILE},
)
INSPECT = Command(
    "inspect",
    "show a run's decays, receptive fields, lower bounds and gates on held-out tokens",
    _inspect,
    "inspect",
    "megalin inspect runs/mine --samples 4 --png figures",
    takes_mixers=True,
    outputs={"--png": Output.FOLDER},
)
DOCTOR = Command(
    "doctor",
    "say why a run ended or does not go on, and what to do next",
    _doctor,
    "doctor",
    "megalin doctor runs/mine",
    adopts_launcher=False,
)
REPORT = Command(
    "report",
    "write a run's report as one HTML file: curves, evaluations, incidents, config; or compare runs",
    _report,
    "report",
    """\
megalin report runs/mine
megalin report --compare runs/a runs/b --output comparison.html""",
    takes_mixers=True,
    prints_result=False,
    outputs={"--output": Output.FILE},
)
