"""A decoder for plain PyTorch: logits, loss and state by a forward, and generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalin.api.prompts import PromptT, prompt_ids
from megalin.data.tokenizers.tokenizer import Tokenizer
from megalin.errors import OperandError
from megalin.generation import Sampling, generate_batches
from megalin.generation.prompts import Prompt, check_prompts
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel, ModelOutput, ModelState
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.parallel.cross_entropy import IGNORED_LABEL


class CausalLMOutput(NamedTuple):
    """Result of a forward."""

    loss: Tensor | None
    """[] mean cross entropy over the labels, in nats, at least fp32; None without labels."""
    logits: Tensor | None
    """[B, T, V] of the next tokens, without the columns that pad the vocabulary; None where they were not asked for."""
    state: ModelState | None
    """The state after the last token; None where it was not asked for."""


class CausalLM(nn.Module):
    """A decoder as one `nn.Module`, without a process group: for custom training loops, evaluation and generation.

    Computation is eager and differentiable. The parameters are those of `language_model`, under the names that they
    have in the checkpoints of a run.

    Attributes:
        language_model: the model of the training code.
        tokenizer: of the run that the model was loaded from, else None; it may be set.
        max_positions: tokens that a sequence may have, those that softmax attention was trained on or that have a
            learned position; None: any number.
        special_tokens: whether `generate` puts the tokenizer's special ids before texts; of the run, else False.
    """

    __call__: Callable[..., CausalLMOutput]

    def __init__(
        self,
        language_model: LanguageModel,
        *,
        tokenizer: Tokenizer | None = None,
        max_positions: int | None = None,
        special_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.language_model, self.tokenizer, self.max_positions = language_model, tokenizer, max_positions
        self.special_tokens = special_tokens
        self._tracked = [weight for mixer in language_model.mixers() for weight in mixer.norm_tracked_weights()]
        self._versions = [weight._version for weight in self._tracked]
        self._draws = 0

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.language_model.config

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.language_model.embedding.weight.device

    def num_parameters(self) -> int:
        """Number of parameters, without the rows that pad the vocabulary."""
        return self.language_model.num_parameters()

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        state: ModelState | None = None,
        return_logits: bool = True,
        return_state: bool = False,
        draw: Tensor | None = None,
    ) -> CausalLMOutput:
        """Runs T tokens of each of B sequences.

        loss = -(1/N) sum over the N valid labels of log softmax(logits_t)[label]; 0 where there is no valid label.
        The check of the ids waits for the device, but not under torch.compile.

        Args:
            input_ids: [B, T] int32 or int64, ids below the vocabulary size.
            labels: [B, T], as Hugging Face models take them: mostly `input_ids` itself, -100 where there is no loss.
                They are shifted here: the logits at t predict labels[:, t + 1], that of the first token is not read.
            targets: [B, T] in place of `labels`, shifted already: the id after each token, -100 where there is no loss.
                Those of `megalin.datasets` are `batch.labels`.
            document_ids: [B, T], non-decreasing along T, for several documents in a sequence: tokens see and predict
                their own document only. None: each sequence is one document.
            state: the `state` of an earlier output, which these tokens continue; the output then has the next one.
            return_logits: False leaves them out, so that a fused loss does not hold [B, T, V] in memory.
            return_state: True gives the state after the last token, for the next call's `state`.
            draw: [B] int64, numbers of the samples, which key the masks of dropout; read in training mode alone. None:
                the samples of all forwards in training mode are counted.

        Raises:
            OperandError: ids, labels or a state of another shape, dtype or device, or ids beyond the vocabulary.
        """
        self._check(input_ids, labels, targets, document_ids, state)
        self._update_derived_buffers()
        model, targets = self.language_model, targets if labels is None else _shifted(labels, document_ids)
        if return_state and state is None:
            state = self.initial_state(len(input_ids))
        output: ModelOutput = model(
            input_ids,
            labels=targets,
            document_ids=document_ids,
            state=state,
            losses="tokens" if return_logits or targets is None else "sum",
            draw=self._draw(input_ids, draw),
        )
        loss = None if targets is None else _mean(output.loss_sums()[0], targets)
        logits = output.logits[..., : self.config.vocab_size] if return_logits and output.logits is not None else None
        return CausalLMOutput(loss, logits, output.state)

    def initial_state(self, batch_size: int) -> ModelState:
        """The state of `batch_size` sequences before their first token, for `forward`."""
        dtype = compute_dtype(self.language_model.embedding.weight)
        return self.language_model.initial_state(batch_size, dtype=dtype)

    def generate(
        self,
        prompts: PromptT,
        *,
        max_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        batch_size: int = 16,
        stop_ids: Sequence[int] | None = None,
        special_tokens: bool | None = None,
    ) -> PromptT:
        """Continues prompts, in eval mode and without gradients; a CUDA graph a token on GPUs.

        Returns completions alone, without their prompts, of the kind of the prompts: a text for a text, a list of ids
        for a list of ids, a list for a list of these, and for a tensor [B, T] one [B, N], in which a completion that
        ended early is filled up with the first stop id. Its draws depend on `seed` and on the prompt's number in the
        call, not on `batch_size`, but for the rounding of the logits.

        Args:
            prompts: text needs a `tokenizer`. Prompts of a list may have different lengths.
            max_tokens: most new tokens of each prompt.
            temperature, top_k, top_p, repetition_penalty: see `megalin.generation.Sampling`; temperature 0 is greedy.
            batch_size: prompts decoded together.
            stop_ids: ids that end a text, and are not part of it; None: the tokenizer's end of document, if there is a
                tokenizer.
            special_tokens: put the ids before each text that its tokenizer has for its begin, such as BOS; None: as the
                run's data.special_tokens.

        Raises:
            ConfigError: text without a tokenizer, an empty prompt, an id beyond the vocabulary, a parameter out of
                range, or prompts that leave a softmax model too few positions.
        """
        if stop_ids is None:
            stop_ids = () if self.tokenizer is None else (self.tokenizer.eod_id,)
        special_tokens = self.special_tokens if special_tokens is None else special_tokens
        given = prompt_ids(prompts, self.tokenizer, stop_ids=stop_ids, special_tokens=special_tokens)
        sources = [Prompt("", f"prompt {number}", {}) for number in range(len(given.ids))]
        check_prompts(sources, given.ids, max_tokens=max_tokens, positions=self.max_positions)
        was_training = self.training
        self.eval()
        try:
            self._update_derived_buffers()
            completions = generate_batches(
                self.language_model,
                given.ids,
                max_tokens=max_tokens,
                sampling=Sampling(temperature, top_k, top_p, seed, repetition_penalty),
                batch_size=batch_size,
                num_ids=None if self.tokenizer is None else self.tokenizer.vocab_size,
                stop_ids=stop_ids,
            )
            found: PromptT = given.of_kind([completion.tokens for completion in completions])
        finally:
            self.train(was_training)
        return found

    def _update_derived_buffers(self) -> None:
        """Updates the buffers that mixers derive from their weights where an optimizer or a load changed these."""
        versions = [weight._version for weight in self._tracked]
        if versions != self._versions:
            self.language_model.after_optimizer_step()
            self._versions = versions

    def _draw(self, input_ids: Tensor, draw: Tensor | None) -> Tensor | None:
        """The numbers of the samples; None where no dropout needs them."""
        if not self.training or self.language_model.dropout_seed is None or draw is not None:
            return draw
        first, self._draws = self._draws, self._draws + len(input_ids)
        return torch.arange(first, self._draws, device=input_ids.device)

    def _check(
        self,
        input_ids: Tensor,
        labels: Tensor | None,
        targets: Tensor | None,
        document_ids: Tensor | None,
        state: ModelState | None,
    ) -> None:
        """Raises OperandError for arguments of `forward` that the model does not accept."""
        if labels is not None and targets is not None:
            raise OperandError("labels and targets are both given; labels are shifted here, targets are not: give one")
        named = {"input_ids": input_ids, "labels": labels, "targets": targets, "document_ids": document_ids}
        tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
        if input_ids.dim() != 2 or not input_ids.numel():
            raise OperandError(f"input_ids has the shape {list(input_ids.shape)}; give ids [B, T] with B, T >= 1")
        for name, tensor in tensors.items():
            if tensor.dtype not in (torch.int32, torch.int64):
                raise OperandError(f"{name} has the dtype {tensor.dtype}; use torch.int64")
            if tensor.shape != input_ids.shape:
                raise OperandError(
                    f"{name} has the shape {list(tensor.shape)}, but input_ids {list(input_ids.shape)}; give equal ones"
                )
            if tensor.device != self.device:
                raise OperandError(
                    f'{name} is on "{tensor.device}", but the model on "{self.device}"; move one of them'
                )
        if state is not None and len(state.positions) != len(input_ids):
            raise OperandError(
                f"state is of {len(state.positions)} sequences, but input_ids has {len(input_ids)}; give as many"
            )
        if state is not None and self.training and self.language_model.dropout_seed is not None:
            raise OperandError(
                "dropout of a continued sequence has no masks; call model.eval(), or leave out the state"
            )
        if not torch.compiler.is_compiling():
            self._check_ids({name: tensor for name, tensor in tensors.items() if name != "document_ids"})

    def _check_ids(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises OperandError for ids beyond the vocabulary; a label may be ignored."""
        vocab_size = self.config.vocab_size
        bounds = torch.stack([torch.stack(tensor.aminmax()).long() for tensor in tensors.values()]).tolist()
        for name, (least, largest) in zip(tensors, bounds, strict=True):
            if largest >= vocab_size or (least < 0 and name == "input_ids"):
                outside = largest if largest >= vocab_size else least
                raise OperandError(
                    f"{name} has the id {outside}, outside of the vocabulary of {vocab_size} ids (0 to "
                    f"{vocab_size - 1}); use the tokenizer that made the model's data"
                )
            if name != "input_ids" and least < 0:
                ids = tensors[name]
                wrong = ids[(ids < 0) & (ids != IGNORED_LABEL)]
                if wrong.numel():
                    raise OperandError(f"{name} has the id {int(wrong[0])}; use ids, or {IGNORED_LABEL} for no loss")


def _shifted(labels: Tensor, document_ids: Tensor | None) -> Tensor:
    """Labels [B, T] as Hugging Face models take them -> the id after each token, ignored at a document's end."""
    ends = torch.full_like(labels[:, :1], IGNORED_LABEL)
    following = labels[:, 1:]
    if document_ids is not None:
        following = following.masked_fill(document_ids[:, 1:] != document_ids[:, :-1], IGNORED_LABEL)
    return torch.cat([following, ends], dim=1).long()


def _mean(loss_sum: Tensor, targets: Tensor) -> Tensor:
    return loss_sum / (targets != IGNORED_LABEL).sum().clamp(min=1)
