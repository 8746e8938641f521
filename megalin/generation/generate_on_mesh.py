"""Generation on the ranks of a mesh: data parallelism over prompts, tensor parallelism over weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from megalin.errors import ConfigError
from megalin.generation.generate import Completion, generate_batches, generation_problems
from megalin.generation.sampling import Sampling
from megalin.model.language_model import LanguageModel
from megalin.parallel.agreement import on_every_rank
from megalin.parallel.collectives import Axis
from megalin.parallel.mesh import Mesh


def generate_on_mesh(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    mesh: Mesh,
    *,
    max_tokens: int,
    sampling: Sampling,
    batch_size: int = 1,
    num_ids: int | None = None,
    stop_ids: Sequence[int] = (),
    stop_when: Callable[[list[int]], bool] | None = None,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Iterator[Completion]:
    """Yields the completion of every prompt, in order, on every rank: those of one process up to the rounding of the
    logits. A collective; all ranks give the same arguments and consume all completions.

    Batches go round the data axis, one a rank and round, and a round's completions are gathered at its end.

    Args:
        mesh: of data and tensor parallelism alone; the model has its weights on `mesh.tp`.
        batch_size: prompts that a rank decodes together; fewer where that keeps more ranks busy.
        stop_when, on_tokens: as in `generate_batches`, of this rank's batches.

    Raises:
        ConfigError: on every rank, as `generate_batches`.
    """
    assert mesh.cp.size == mesh.pp.size == 1, (mesh.cp.size, mesh.pp.size)
    if problems := generation_problems(model, prompts, sampling, max_tokens=max_tokens, batch_size=batch_size):
        raise ConfigError("\n".join(problems))
    ranks = mesh.samples
    size = _batch_size(len(prompts), batch_size, ranks)
    own = [number for number in range(len(prompts)) if number // size % ranks.size == ranks.rank]
    completions: Iterator[Completion] = iter(())
    if own:
        completions = generate_batches(
            model,
            [prompts[number] for number in own],
            max_tokens=max_tokens,
            sampling=sampling,
            numbers=own,
            batch_size=size,
            num_ids=num_ids,
            stop_ids=stop_ids,
            stop_when=stop_when,
            on_tokens=on_tokens,
        )
    return _rounds(completions, size, num_rounds(len(prompts), batch_size, ranks))


def num_rounds(num_prompts: int, batch_size: int, ranks: Axis) -> int:
    """Batches of the first rank in `generate_on_mesh`, the most of any rank."""
    return -(-num_prompts // (_batch_size(num_prompts, batch_size, ranks) * ranks.size))


def _batch_size(num_prompts: int, batch_size: int, ranks: Axis) -> int:
    """Prompts of a rank's batch: the given number, or fewer where the ranks would not all have a batch."""
    return min(batch_size, -(-num_prompts // ranks.size))


def _rounds(completions: Iterator[Completion], size: int, rounds: int) -> Iterator[Completion]:
    for _ in range(rounds):
        ranks = on_every_rank(lambda: list(islice(completions, size)), list[Completion])
        found = {each.number: each for of_rank in ranks for each in of_rank}  # equal on a tensor-parallel axis
        yield from (found[number] for number in sorted(found))
