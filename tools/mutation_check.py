"""Breaks the exchanges of context parallelism one at a time, and shows that the suite goes red for each.

python tools/mutation_check.py [NAME ...]

Each mutation is one textual change of a copy of the tree, against which the named tests run until one fails. Exit code
0: unchanged, every test passes, and each change is noticed by one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CONTEXT = "tests/parallel/test_context.py"
COLLECTIVES = "tests/parallel/test_collectives.py"
VERIFY = "tests/verify/test_context_parallel.py::test_every_mixer_and_encoder_agrees_with_one_process"


class Mutation(NamedTuple):
    """One mistake."""

    name: str
    file: str
    """Under the root."""
    old: str
    """Text that the file holds once."""
    new: str
    tests: str
    """What pytest runs."""
    only: str = ""
    """pytest's -k: the cases among them."""


FOLD, AXIS, ATTENTION = "megalin/parallel/fold.py", "megalin/parallel/context.py", "megalin/layers/mixers/softmax.py"
DENSE, ENCODER, STATES = (
    "megalin/layers/mixers/dense_attention.py",
    "megalin/model/encoder.py",
    "megalin/ops/scan_states.py",
)
SENT, ENTERING = "megalin/parallel/collectives.py", "megalin/layers/entering.py"

MUTATIONS = (
    Mutation(
        "fold_drops_decay", FOLD, "return torch.exp(exponent).where", "return torch.ones_like(exponent).where", CONTEXT
    ),
    Mutation(
        "fold_takes_own_state", FOLD, "(others < axis.rank)  # [j, i]", "(others <= axis.rank)  # [j, i]", CONTEXT
    ),
    Mutation(
        "fold_without_adjoint",
        FOLD,
        "* gathered).sum(0)\n        d_decay",
        "* gathered).sum(0) * 0\n        d_decay",
        CONTEXT,
    ),
    Mutation(
        "fold_adjoint_with_decay_of_another_rank",
        FOLD,
        "_decay_gradient(totals[axis.rank],",
        "_decay_gradient(totals[0],",
        CONTEXT,
    ),
    Mutation("ring_drops_decay", FOLD, "own[sent] + passed * arrived[sent]", "own[sent] + arrived[sent]", CONTEXT),
    Mutation(
        "ring_passes_documents_on", FOLD, ".where(kept[:, None, None, None], 0.0)", "", CONTEXT, "ring or pipelined"
    ),
    Mutation(
        "ring_adjoint_of_wrong_neighbour",
        FOLD,
        "continues[(axis.rank + 1) % axis.size, axis.rank]",
        "continues[axis.rank, axis.rank - 1]",
        CONTEXT,
    ),
    Mutation("ring_adjoint_goes_forwards", FOLD, "ctx.num_blocks, step=-1)", "ctx.num_blocks, step=1)", CONTEXT),
    Mutation("borders_see_later_ranks", AXIS, "Borders(same & earlier[..., None]", "Borders(same", CONTEXT),
    Mutation("halo_missing", AXIS, "return known.narrow(", "return 0.0 * known.narrow(", CONTEXT),
    Mutation("halo_of_another_document", AXIS, "tails.masked_fill(~seen[..., None], 0.0)", "tails", CONTEXT),
    Mutation(
        "halo_of_wrong_rank",
        AXIS,
        "self.axis.rank * num, width)",
        "(self.axis.rank - 1) % self.size * num, width)",
        CONTEXT,
    ),
    Mutation("sums_around_swapped", AXIS, "return gathered[:, 1].where(", "return gathered[:, 0].where(", CONTEXT),
    Mutation(
        "neighbours_of_another_document",
        AXIS,
        "return gathered[:, 1].where(others[rank], 0.0).sum(0)",
        "return gathered[:rank, 1].sum(0)",
        "tests/model/test_encoder_on_ranks.py::test_another_document_does_not_move_a_bit_across_ranks",
    ),
    Mutation(
        "gather_keeps_its_own_gradient",
        SENT,
        "return reduce_scatter(grads[0], ctx.axis, dim=ctx.dim), None, None",
        "return local_slice(grads[0], ctx.axis, dim=ctx.dim), None, None",
        COLLECTIVES,
        "gather",
    ),
    Mutation(
        "sum_keeps_its_own_gradient",
        SENT,
        "return all_reduce(grads[0], ctx.axis), None",
        "return grads[0], None",
        COLLECTIVES,
        "copy",
    ),
    Mutation(
        "swapped_split_order",
        SENT,
        "torch.cat(received.chunk(axis.size), join)",
        "torch.cat(received.chunk(axis.size)[::-1], join)",
        COLLECTIVES,
        "exchange",
    ),
    Mutation(
        "exchange_without_adjoint",
        SENT,
        "return all_to_all(grads[0], ctx.axis, split=ctx.join, join=ctx.split), None",
        "return all_to_all(0 * grads[0], ctx.axis, split=ctx.join, join=ctx.split), None",
        COLLECTIVES,
        "exchange",
    ),
    Mutation(
        "state_of_all_documents",
        STATES,
        "return document_ids == document_ids[:, -1:]",
        "return document_ids >= 0",
        VERIFY,
        "3-tnl",
    ),
    Mutation("total_decay_lacks_a_token", ENTERING, "log_decay.sum(1)", "log_decay[:, 1:].sum(1)", VERIFY, "3-mamba2"),
    Mutation("convolution_without_halo", ENTERING, "return cp.halo(", "return 0 * cp.halo(", VERIFY, "3-mamba2"),
    Mutation("local_positions", AXIS, " + self.tokens_before(tokens)", "", VERIFY, "3-softmax-grouped"),
    Mutation(
        "attention_across_documents",
        ATTENTION,
        "own = None if documents is None else",
        "own = None if self.cp.size > 1 else",
        VERIFY,
        "3-softmax-grouped",
    ),
    Mutation(
        "gathered_keys_with_local_positions",
        ATTENTION,
        "visible_in_row(self.cp.positions(q),",
        "visible_in_row(torch.arange(q.shape[1]),",
        VERIFY,
        "softmax and heads",
    ),
    Mutation("local_sum", DENSE, "self.cp.total(dense_memory(k, v))", "dense_memory(k, v)", VERIFY, "3-heads"),
    Mutation("local_count_of_tokens", DENSE, "return row.valid.sum(1", "return context.valid.sum(1", VERIFY, "3-heads"),
    Mutation(
        "windows_end_with_the_rank",
        DENSE,
        "if offset == 0 and q.shape[1] % window == 0:",
        "if q.shape[1] > 0:",
        VERIFY,
        "3-local",
    ),
    Mutation(
        "windows_start_with_the_rank", DENSE, "offset=(before + offset) % window", "offset=offset", VERIFY, "3-local"
    ),
    Mutation(
        "predictions_of_another_rank",
        AXIS,
        ".masked_fill(absent[..., None], 0.0)",
        "",
        VERIFY,
        "3-heads",
    ),
    Mutation(
        "sequences_counted_on_every_rank",
        "megalin/data/packing.py",
        "if cp.axis.rank > 0:",
        "if cp.size < 0:",
        VERIFY,
        "3-heads",
    ),
    Mutation(
        "mean_over_a_part",
        ENCODER,
        "if whole is None else whole.sum(",
        "if whole is None else kept.sum(",
        VERIFY,
        "3-classes-of-the-mean",
    ),
    Mutation(
        "first_token_of_every_rank",
        ENCODER,
        "return self.cp.total(first)[:, 0]",
        "return first[:, 0]",
        VERIFY,
        "3-classes",
    ),
    Mutation(
        "labels_counted_on_one_rank",
        "megalin/parallel/mesh.py",
        "return all_reduce(value, self.data)",
        "return value",
        VERIFY,
        "3-tnl",
    ),
)


def check(mutation: Mutation, *, holds: str) -> None:
    """Raises SystemExit where the mutated file does not hold the text exactly once."""
    if holds.count(mutation.old) != 1:
        raise SystemExit(
            f"mutation {mutation.name}: {mutation.file} holds {mutation.old!r} {holds.count(mutation.old)} times, not "
            "once; bring MUTATIONS in step with the code"
        )


def copy_tree(target: Path) -> None:
    """What the tests need of the tree, compiled modules too."""
    ignored = shutil.ignore_patterns("__pycache__", ".git", "build", "runs", ".*_cache", ".venv", ".whl")
    shutil.copytree(ROOT, target, symlinks=True, ignore=ignored)


def run(tree: Path, tests: Sequence[str], only: str) -> bool:
    """Whether the tests pass in the tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    if only:
        command += ["-k", only]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} did not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def imports_from(tree: Path) -> Path:
    """Where `import megalin` comes from in the tree's runs."""
    command = [sys.executable, "-c", "import megalin; print(megalin.__file__)"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the mutations of these names, or all; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations (all)")
    names = parser.parse_args(arguments).names
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    if unknown := set(names) - {mutation.name for mutation in MUTATIONS}:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(m.name for m in MUTATIONS)}")
    for mutation in chosen:
        check(mutation, holds=(ROOT / mutation.file).read_text())
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        assert imports_from(tree).is_relative_to(tree), imports_from(tree)
        for tests, only in sorted({(mutation.tests, mutation.only) for mutation in chosen}):
            if not run(tree, [tests], only):
                raise SystemExit(f"{tests} -k {only!r} is red without any change; make it green first")
        for mutation in chosen:
            started, path = time.monotonic(), tree / mutation.file
            original = path.read_text()
            path.write_text(original.replace(mutation.old, mutation.new))
            survived = run(tree, [mutation.tests], mutation.only)
            path.write_text(original)
            survivors += [mutation.name] * survived
            verdict = "SURVIVED" if survived else "red"
            print(f"{verdict:8}  {mutation.name}  ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations were noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
