"""Filters a corpus by the perplexity of a trained model, on any number of ranks, with a page of samples to read."""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path

from corpus_arguments import corpus_parser

from megalin.data.corpus import inputs
from megalin.data.corpus.jsonl_output import check_free
from megalin.data.corpus.parts import CorpusPart, PartSubset, discard, plan
from megalin.data.corpus.progress import shown_progress
from megalin.data.corpus.score_selection import SelectOptions, check_selection, select
from megalin.errors import exit_code
from megalin.evaluation.scoring import ScoringModel, score_corpus
from megalin.generation import load_for_generation
from megalin.launch import adopt_launcher
from megalin.parallel.agreement import on_every_rank, rank, world_size
from megalin.parallel.process_group import compute_device, process_group
from megalin.train.build import COMPUTE_DTYPES

# Ranks may differ in work, and wait for each other in one collective at the end.
_LONGEST_WAIT = timedelta(days=30)


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0, or the exit code of the printed error."""
    args = _parser().parse_args(arguments)
    return exit_code(lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = corpus_parser(__doc__, workers="processes that write what is kept, once the ranks have scored all")
    parser.set_defaults(log_interval=10_000)
    add = parser.add_argument
    add("run", type=Path, help="folder of a trained run with data.tokenizer set")
    add("--max-perplexity", type=float, help="keep documents up to this perplexity")
    add("--keep-quantile", type=float, help="keep this fraction of the documents, those of lowest perplexity")
    add(
        "--dtype",
        choices=sorted(COMPUTE_DTYPES),
        help="dtype of the model's weights and computation (the run's train.dtype); scores depend on it",
    )
    add("--samples", type=int, default=20, help="kept documents, and as many removed ones, on the page")
    add("--seed", type=int, default=0, help="seed of the samples")
    return parser


def _run(args: argparse.Namespace) -> None:
    adopt_launcher()
    options = SelectOptions(
        max_perplexity=args.max_perplexity,
        keep_quantile=args.keep_quantile,
        json_key=args.json_key,
        output_prefix=args.output_prefix,
        compression=args.compress,
        workers=args.workers,
        limit_bytes=args.max_document_bytes,
        samples=args.samples,
        seed=args.seed,
    )
    check_selection(options)
    check_free(args.output_prefix, resume=args.resume)
    parts = plan(inputs.expand_inputs(args.input))
    folder = Path(f"{args.output_prefix}.parts")
    device = compute_device()
    with process_group(device, timeout=_LONGEST_WAIT):
        on_every_rank(lambda: _score(args, parts, folder / "scores"))
        if rank() > 0:
            return
    total_bytes = sum(part.size_bytes for part in parts)
    with shown_progress("selecting", total_bytes, interval=args.log_interval) as report_progress:
        report = select(parts, folder / "scores", options, on_progress=report_progress)
    discard(folder)
    for kind, count in report.bad_lines.items():
        print(f"left out: {count} x {kind}", file=sys.stderr)
    print(
        f"{report.kept_documents} of {report.documents} documents kept, of a perplexity of at most "
        f"{report.max_perplexity:.4g}: {len(report.files)} files; see {report.page}"
    )


def _score(args: argparse.Namespace, parts: list[CorpusPart], folder: Path) -> None:
    """Scores this rank's subset of the parts; the first rank's progress stands for all."""
    subset = PartSubset(rank(), world_size())
    scorer = ScoringModel(*load_for_generation(args.run, compute_device(), dtype=args.dtype))
    mine = sum(part.size_bytes for part in parts[subset.number :: subset.total])
    title = f"scoring (rank {subset.number} of {subset.total})"
    with shown_progress(title, mine, interval=args.log_interval, shown=subset.number == 0) as report_progress:
        score_corpus(
            scorer,
            parts,
            folder,
            json_key=args.json_key,
            limit_bytes=args.max_document_bytes,
            resume=args.resume,
            subset=subset,
            on_progress=report_progress,
        )


if __name__ == "__main__":
    sys.exit(main())
