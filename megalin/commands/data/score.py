"""`megalin data score`: a corpus filtered by the perplexity of a trained model, with a page of samples to read."""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path

from megalin.data.corpus import inputs
from megalin.data.corpus.jsonl_output import check_free
from megalin.data.corpus.parts import CorpusPart, PartSubset, discard, plan
from megalin.data.corpus.progress import shown_progress
from megalin.data.corpus.score_selection import SelectOptions, check_selection, select
from megalin.evaluation.scoring import ScoringModel, score_corpus
from megalin.generation import load_for_generation
from megalin.parallel.agreement import on_every_rank, rank, world_size
from megalin.parallel.process_group import compute_device, process_group

# Ranks may differ in work, and wait for each other in one collective at the end.
_LONGEST_WAIT = timedelta(days=30)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
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
            return 0
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
    return 0


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
