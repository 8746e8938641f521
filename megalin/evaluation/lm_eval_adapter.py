"""A run as a model of the harness lm-eval: likelihoods by carried states and batched generation, without an export."""

from __future__ import annotations

import difflib
import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megalin.config import suggest
from megalin.data.tokenizers.special_tokens import SpecialTokenRule, special_tokens_of
from megalin.errors import ConfigError
from megalin.evaluation.choices.encoding import EncodedRequest, check_vocabulary
from megalin.evaluation.choices.scoring import score_carried
from megalin.generation import Sampling, generate_on_mesh
from megalin.generation.load import DtypeName, GenerationRun
from megalin.generation.prompts import completion_text
from megalin.parallel.mesh import Mesh

MAX_NEW_TOKENS = 256
"""Tokens of a completion if a task sets no number, as in lm-eval's own models."""
_SAMPLING_KEYS = frozenset(
    {"until", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_gen_toks"}
)
_log = logging.getLogger(__name__)


class MegalinModel(TemplateLM):
    """The model of a run on the ranks of a mesh, as lm-eval sees it.

    Contexts that several continuations share run once: their states are copied into each. Texts are encoded as in
    lm-eval's `hf` model, so that the results of an exported run are the same for equal `max_length`.

    Every rank runs the harness as a process of its own and gives this model the same requests; the data axis divides
    them, so that each rank has all results.

    Args:
        mesh: of data and tensor parallelism; each data-parallel rank has the whole model, on `mesh.tp`.
        max_length: most tokens of a request that the model reads at once; requests lose tokens on the left, and
            rolling likelihoods are computed in windows of this length. None: the run's data.sequence_length.
        batch_size: texts that are generated together.
        special_tokens: put the tokenizer's special ids, such as BOS, around texts; None: as data.special_tokens, or
            else as the tokenizer does by default, which is what lm-eval's `hf` model does.
    """

    def __init__(
        self,
        run: GenerationRun,
        mesh: Mesh,
        *,
        dtype: DtypeName | None = None,
        batch_size: int = 16,
        max_length: int | None = None,
        special_tokens: bool | None = None,
    ) -> None:
        super().__init__()
        asked = run.config.data.special_tokens if special_tokens is None else special_tokens
        self.special_tokens = special_tokens_of(run.tokenizer, asked)
        check_vocabulary(run.tokenizer, run.model.vocab_size)
        self.max_length = run.config.data.sequence_length if max_length is None else max_length
        for name, value in (("--max-length", self.max_length), ("--batch-size", batch_size)):
            if value < 1:
                raise ConfigError(f"{name} {value}: use at least 1")
        if run.positions is not None and self.max_length > run.positions:
            raise ConfigError(
                f"--max-length {self.max_length}: this softmax model was trained on {run.positions} positions "
                "(data.sequence_length); use at most as many"
            )
        self._run, self._mesh, self._batch_size = run, mesh, batch_size
        self._device, self._merged = mesh.device, 0
        self._model = run.load_model(mesh.device, dtype=dtype, tp=mesh.tp)

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        return self._run.tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        """The id that precedes texts without a context, and the first window of a rolling likelihood."""
        return self.special_tokens.prefix_id

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's sha256 and its special tokens, for lm-eval's cache of requests."""
        return f"{self._run.tokenizer.digest} {self.special_tokens}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text. None adds special tokens by the rule of `special_tokens`, but not to a text that begins with
        the prefix token's own name, which then is this token."""
        tokenizer = self._run.tokenizer
        if add_special_tokens is not None:
            return SpecialTokenRule(add_special_tokens, self.prefix_token_id).encoder(tokenizer).encode(string)
        name = tokenizer.decode([self.prefix_token_id])
        if name and string.startswith(name):
            return [self.prefix_token_id, *tokenizer.encode(string.removeprefix(name))]
        return self.special_tokens.encoder(tokenizer).encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a context and a continuation as lm-eval splits them; a continuation that has no id of its own, because
        it merges with its context, has the last id of both."""
        before, after = super()._encode_pair(context, continuation)
        if not after and (whole := self.tok_encode(context + continuation)):
            self._merged += 1
            before, after = whole[:-1] or [self.prefix_token_id], whole[-1:]
        return before, after

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability in nats, whether greedy decoding gives it) of each; warns of merged continuations."""
        self._merged = 0
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        if self._merged:
            _log.warning(
                "%d of %d continuations merge with their context into one token, which is scored for them",
                self._merged,
                len(requests),
            )
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability in nats, whether greedy decoding gives it) of each continuation after its context, by ids.

        Raises:
            ConfigError: a continuation without a token, or of more than `max_length`.
        """
        encoded = []
        for texts, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise ConfigError(
                    f"a continuation has {len(continuation)} tokens: {str(texts)[-80:]}; it needs 1 to --max-length "
                    f"{self.max_length}"
                )
            ids = (context + continuation)[-(self.max_length + 1) :]
            encoded.append(EncodedRequest(ids, len(continuation)))
        if not encoded:
            return []
        scores = score_carried(self._model, encoded, self._mesh)
        return list(zip(scores.log_probabilities.tolist(), scores.greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text in nats, in windows of `max_length` tokens that predict every token once."""
        windows, counts = [], []
        for request in requests:
            own = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            pairs = [make_disjoint_window(window) for window in own]
            windows += [(request.args[0], context, continuation) for context, continuation in pairs]
            counts.append(len(pairs))
        values = [value for value, _ in self._loglikelihood_tokens(windows)]
        ends = itertools.accumulate(counts)
        return [sum(values[end - count : end]) for end, count in zip(ends, counts, strict=True)]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Completions up to the first of the request's stop texts, which are not part of them.

        Raises:
            ConfigError: generation arguments that megalin does not have, or no room for a context.
        """
        completions = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        for numbers in groups.values():
            options = self._options(requests[numbers[0]].args[1])
            room = self.max_length - options.max_tokens
            if room < 1:
                raise ConfigError(
                    f"max_gen_toks = {options.max_tokens} leaves no room for a context within --max-length "
                    f"{self.max_length}; raise it, or lower max_gen_toks by --gen-kwargs"
                )
            # Similar lengths together: a batch runs its prompts in pieces of one length.
            prompts = {number: self.tok_encode(requests[number].args[0])[-room:] for number in numbers}
            order = sorted(numbers, key=lambda number: len(prompts[number]))
            for completion in generate_on_mesh(
                self._model,
                [prompts[number] or [self.prefix_token_id] for number in order],
                self._mesh,
                max_tokens=options.max_tokens,
                sampling=options.sampling,
                batch_size=self._batch_size,
                num_ids=self._run.tokenizer.vocab_size,
                stop_ids=(self.eot_token_id,),
                stop_when=lambda tokens, until=options.until: self._holds(tokens, until),  # type: ignore[misc]
            ):
                number = order[completion.number]
                text = completion_text(self._run.tokenizer, prompts[number], completion.tokens)
                completions[number] = postprocess_generated_text(text, options.until, None)
                self.cache_hook.add_partial("generate_until", requests[number].args, completions[number])
        return completions

    def _holds(self, tokens: list[int], until: Sequence[str]) -> bool:
        text = self._run.tokenizer.decode(tokens)
        return any(stop in text for stop in until if stop)

    def _options(self, arguments: Mapping[str, Any]) -> _Options:
        values = dict(normalize_gen_kwargs(dict(arguments), MAX_NEW_TOKENS))
        if unknown := sorted(set(values) - _SAMPLING_KEYS):
            raise ConfigError(
                f"generation argument {unknown[0]}: not supported; {suggest(unknown[0], sorted(_SAMPLING_KEYS))}"
            )
        sampling = Sampling(
            temperature=float(values.get("temperature", 1.0)) if values["do_sample"] else 0.0,
            top_k=values.get("top_k"),
            top_p=values.get("top_p"),
            repetition_penalty=values.get("repetition_penalty", 1.0),
        )
        return _Options(sampling, values["max_gen_toks"], values["until"])


class _Options(NamedTuple):
    """Generation arguments of a request."""

    sampling: Sampling
    max_tokens: int
    until: list[str]
    """Texts that end a completion."""


class LmEvalOptions(NamedTuple):
    """Selection of lm-eval's tasks."""

    tasks: Sequence[str]
    include_path: Path | None = None
    """Folder with further task files (YAML)."""
    default_tasks: bool = True
    """Whether the tasks that come with lm-eval are known; most of them download their data."""
    num_fewshot: int | None = None
    limit: int | None = None
    """Questions of each task, the first ones; None: all."""
    gen_kwargs: str | None = None
    """Generation arguments that replace those of the tasks, "key=value,key=value"."""


def evaluate_tasks(model: MegalinModel, options: LmEvalOptions) -> dict[str, Any]:
    """lm-eval's results of a run's model.

    Raises:
        ConfigError: no task, an unknown one, or a limit of 0.
    """
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit {options.limit}: use at least 1, or leave it out for all questions")
    include = None if options.include_path is None else str(options.include_path)
    manager = TaskManager(include_path=include, include_defaults=options.default_tasks)
    if unknown := [task for task in options.tasks if not manager.match_tasks([task])]:
        close = difflib.get_close_matches(unknown[0], manager.all_tasks, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "add a folder of task files (YAML) by --include-path"
        raise ConfigError(f"--tasks {unknown[0]}: no such task among {len(manager.all_tasks)}; {hint}")
    results: dict[str, Any] | None = simple_evaluate(
        model=model,
        tasks=manager.match_tasks(list(options.tasks)),
        task_manager=manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        gen_kwargs=options.gen_kwargs,
        bootstrap_iters=0,
    )
    assert results is not None  # only ranks other than the first have none
    return results
