"""Configs of models: widths, and a pattern of blocks of sub-layers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from megalin.config import REPORTED, SILENT, Change, Config, NestedConfigError, parse, problems
from megalin.layers.choices import NormKind
from megalin.layers.config import SublayerConfig
from megalin.layers.linear_attention_config import PositionedAttentionConfig

MAX_BLOCKS = 10_000
"""Largest number of blocks of a model; every one is a module of each rank's plan."""


class BlockConfig(Config):
    """One kind of block, and its number of repetitions."""

    on_change: ClassVar[Change | None] = "refused"
    sublayers: list[SublayerConfig] = pydantic.Field(min_length=1)
    """The mixers of the block in order: token mixers and channel mixers, each with its norm and residual rule."""
    repeat: int = pydantic.Field(default=1, ge=1, le=MAX_BLOCKS)
    """Number of such blocks in a row."""

    @pydantic.model_validator(mode="after")
    def _last_sublayer_writes_to_the_residual_stream(self) -> BlockConfig:
        if self.sublayers[-1].residual == "two_hop":
            raise ValueError(
                'the last sub-layer has residual = "two_hop", which drops its result; use residual = "add" there'
            )
        return self

    @pydantic.model_validator(mode="after")
    def _norms_stand_where_the_residual_rule_says(self) -> BlockConfig:
        for index, sublayer in enumerate(self.sublayers):
            if sublayer.residual == "add_norm" and sublayer.norms_input:
                raise ValueError(
                    f'sublayers.{index}: {sublayer.type} applies norm = "{sublayer.norm}" to its input, so there is no '
                    'norm for residual = "add_norm" after the addition; use residual = "add", or another norm'
                )
        return self


class StackConfig(Config):
    """Base of the models' configs: vocabulary, width and blocks."""

    on_change: ClassVar[Change | None] = "refused"
    vocab_size: int = pydantic.Field(gt=0, le=2_000_000_000)
    """Number of token ids. The table is padded to a multiple of 128 rows; the padding is masked and not counted."""
    hidden_size: int = pydantic.Field(gt=0, le=1_000_000)
    """Width D of the residual stream."""
    layers: list[BlockConfig] = pydantic.Field(min_length=1)
    """The blocks, first to last."""
    norm: NormKind
    """Norm before the heads."""
    norm_eps: float = pydantic.Field(gt=0)
    """Epsilon of that norm."""
    init_std: Annotated[float, SILENT] = pydantic.Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    embedding_dropout: Annotated[float, REPORTED] = pydantic.Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the residual stream before the first block: token embeddings with their scale, positions and
    input layers. Only in training."""
    hidden_dropout: Annotated[float, REPORTED] = pydantic.Field(default=0.0, ge=0, lt=1)
    """Dropout rate of each sub-layer's output, mixers and FFNs, before it is added to the residual stream; Megatron's
    hidden_dropout, fairseq's dropout (HGRN2's WikiText-103 script: 0.1, with embedding_dropout 0.1). Only in training.
    Masks are functions of train.seed and a sample's number in the run, equal on every mesh. Attention probabilities
    have no dropout: no kernel of a library takes such a mask."""

    @pydantic.field_validator("layers")
    @classmethod
    def _limit_blocks(cls, layers: list[BlockConfig]) -> list[BlockConfig]:
        if (total := sum(block.repeat for block in layers)) > MAX_BLOCKS:
            raise ValueError(f"{total} blocks with their repetitions; use at most {MAX_BLOCKS}")
        return layers

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return sum(block.repeat for block in self.layers)

    @property
    def num_sublayers(self) -> int:
        """Number of sub-layers of all blocks."""
        return sum(block.repeat * len(block.sublayers) for block in self.layers)

    @property
    def output_std(self) -> float:
        """Standard deviation of the initial matrices that write to the residual stream."""
        return self.init_std

    def blocks(self) -> list[tuple[str, BlockConfig]]:
        """Every block with the dotted path of its config; repeated blocks stand several times."""
        return [
            (f"model.layers.{index}", block) for index, block in enumerate(self.layers) for _ in range(block.repeat)
        ]

    def refuse_mixers_that_attend_to(self, tokens: Literal["earlier", "all"], *, rule: str) -> None:
        """Raises ValueError with a line for each sub-layer whose `attends_to` is `tokens`; `rule` ends each line."""
        lines = [
            f'layers.{block}.sublayers.{index}.type = "{sublayer.type}": {rule}'
            for block, config in enumerate(self.layers)
            for index, sublayer in enumerate(config.sublayers)
            if sublayer.attends_to == tokens
        ]
        if lines:
            raise ValueError("\n".join(lines))


class ModelConfig(StackConfig):
    """A decoder language model."""

    kind: Literal["decoder"] = "decoder"
    """Kind of model. decoder: predicts each next token."""
    embedding_scale: float = pydantic.Field(default=1.0, gt=0)
    """Factor on the embedded tokens (TransNormerLLM: the square root of the hidden size)."""
    tie_embeddings: bool = True
    """True: the head uses the embedding's weights."""
    norm: NormKind = "srmsnorm"
    """Norm before the head."""
    norm_eps: float = pydantic.Field(default=1e-6, gt=0)
    """Added to the mean square or the variance inside the root of that norm."""
    output_init: Literal["plain", "scaled_by_depth"] = "plain"
    """Standard deviation of the matrices that write to the residual stream. plain: init_std. scaled_by_depth: init_std
    divided by the square root of the number of sub-layers in the model (Rodimus)."""
    residual_dtype: Literal["compute", "float32"] = "compute"
    """Dtype of the residual stream. compute: that of the weights' computation. float32: at least fp32 (Rodimus)."""

    @pydantic.model_validator(mode="after")
    def _is_causal(self) -> ModelConfig:
        self.refuse_mixers_that_attend_to(
            "all", rule='it attends to later tokens, which a decoder must predict; use it with kind = "encoder"'
        )
        return self

    @pydantic.model_validator(mode="after")
    def _has_one_kind_of_absolute_positions(self) -> ModelConfig:
        lines: dict[str, str] = {}  # of the first sub-layer of each type and kind
        for block, config in enumerate(self.layers):
            for index, sublayer in enumerate(config.sublayers):
                if isinstance(sublayer, PositionedAttentionConfig) and sublayer.absolute_positions != "none":
                    rows = "" if sublayer.max_positions is None else f", max_positions = {sublayer.max_positions}"
                    value = f'absolute_positions = "{sublayer.absolute_positions}"{rows} of type = "{sublayer.type}"'
                    lines.setdefault(value, f"layers.{block}.sublayers.{index}: {value}")
        if len(lines) > 1:
            raise ValueError(
                "\n".join(lines.values()) + "\nabsolute positions are added once, to the embedded tokens: give the "
                "same keys to sub-layers of one type, and leave them out of all others"
            )
        return self

    @property
    def max_positions(self) -> int | None:
        """Longest sequence with learned absolute positions, in tokens: rows of their table; None without them."""
        found = _with_learned_positions(self)
        return None if found is None else found[1].max_positions

    @property
    def output_std(self) -> float:
        """Standard deviation of the initial matrices that write to the residual stream."""
        if self.output_init == "plain":
            return self.init_std
        return self.init_std / math.sqrt(self.num_sublayers)


class EncoderConfig(StackConfig):
    """A bidirectional encoder: heads for masked tokens and the next sentence, or one that classifies sequences."""

    kind: Literal["encoder"]
    """Kind of model. encoder: every token attends to the full sequence."""
    max_positions: int = pydantic.Field(default=512, gt=0)
    """Longest sequence, in tokens: rows of the table of learned positions."""
    position_embedding: Literal["learned", "sinusoidal"] = "learned"
    """Absolute positions, added to the embedded tokens. learned: a table. sinusoidal: sines and cosines, without
    parameters, for an even hidden size (with relpe = "none", the first row of the DenseAttention paper's table of the
    Retrieval task, section 4.1)."""
    num_token_types: int = pydantic.Field(default=2, ge=2)
    """Rows of the table of token types: 0 for segment A, 1 for segment B."""
    embedding_norm: Literal["hardtanh", "none"] | NormKind = "hardtanh"
    """Applied to the sum of the three embeddings. hardtanh: limits each number to [-1, 1] (DANet). layernorm: BERT."""
    norm: NormKind = "uncentered_layernorm"
    """Norm after the blocks, and inside the masked-token head."""
    norm_eps: float = pydantic.Field(default=1e-12, gt=0)
    """Added, in these norms and embedding_norm, to the variance or mean square inside the root, or to the magnitude
    that they divide by."""
    final_norm: bool = True
    """False: no norm after the blocks; for blocks that end with one (residual = "add_norm", BERT)."""
    head_bias: bool = False
    """True: the dense layers inside both heads have biases, as BERT's."""
    pooler: Literal["tanh", "none"] = "tanh"
    """Layer between the pooled vector x and the classes. tanh: tanh(x W). none: the classifier reads x itself."""
    num_classes: int | None = pydantic.Field(default=None, ge=2)
    """Classes of a sequence-classification head in place of the pretraining heads; left out: pretraining."""
    pooling: Literal["first", "mean"] = "first"
    """Input of the sequence head. first: the first token. mean: the mean over the tokens, without padding."""
    logit_bounds: list[float] | None = pydantic.Field(default=None, min_length=2, max_length=2)
    """Least and largest logit of a masked token: logits are clamped to them (Hardtanh), in training and evaluation.
    [-20, 2]: the dampened logits of the DenseAttention paper (section 4.2), with the bounds of its first released code,
    whose decoder was not tied. Left out: no bounds, as in its later code."""

    @pydantic.model_validator(mode="after")
    def _is_bidirectional(self) -> EncoderConfig:
        self.refuse_mixers_that_attend_to(
            "earlier",
            rule="it attends to earlier tokens only, so an encoder cannot use it; a decoder (the default kind) can",
        )
        return self

    @pydantic.model_validator(mode="after")
    def _has_as_many_sines_as_cosines(self) -> EncoderConfig:
        if self.position_embedding == "sinusoidal" and self.hidden_size % 2:
            raise ValueError(
                f'position_embedding = "sinusoidal" has as many sines as cosines, but hidden_size = {self.hidden_size} '
                'is odd; use an even width, or position_embedding = "learned"'
            )
        return self

    @pydantic.model_validator(mode="after")
    def _has_bounded_logits(self) -> EncoderConfig:
        if self.logit_bounds is None:
            return self
        problems = []
        if not self.logit_bounds[0] < self.logit_bounds[1]:
            problems.append(f"logit_bounds = {self.logit_bounds}: give the least and a larger bound, such as [-20, 2]")
        if self.num_classes is not None:
            problems.append(
                f"logit_bounds = {self.logit_bounds} has no effect with num_classes, which replaces the masked-token "
                "head; remove one of them"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


AnyModelConfig = ModelConfig | EncoderConfig
"""The config of any model."""


def _with_learned_positions(model: ModelConfig) -> tuple[str, PositionedAttentionConfig] | None:
    """The first sub-layer with learned absolute positions and its dotted path."""
    for path, block in model.blocks():
        for index, sublayer in enumerate(block.sublayers):
            if isinstance(sublayer, PositionedAttentionConfig) and sublayer.absolute_positions == "learned":
                return f"{path}.sublayers.{index}", sublayer
    return None


def max_positions_key(model: AnyModelConfig) -> str:
    """The dotted key of the model's `max_positions`, for errors."""
    found = None if isinstance(model, EncoderConfig) else _with_learned_positions(model)
    return f"{'model' if found is None else found[0]}.max_positions"


def parse_model(values: Mapping[str, Any], source: str, mixers: Collection[str] = ()) -> AnyModelConfig:
    """The model config in a table, by its `kind`.

    Args:
        mixers: of other packages, which may be imported (`external_module`).

    Raises:
        ConfigError: as `parse` does.
    """
    if values.get("kind") == "encoder":
        return parse(EncoderConfig, values, source, context=mixers)
    return parse(ModelConfig, values, source, context=mixers)


def _resolve(values: Any, info: pydantic.ValidationInfo) -> Any:
    """A table -> an instance of the class of its `kind`; an instance is returned unchanged."""
    if isinstance(values, StackConfig):
        return values
    if not isinstance(values, Mapping):
        raise ValueError(f"{values!r} is not a table; write it as [model] with its keys below")
    cls = EncoderConfig if values.get("kind") == "encoder" else ModelConfig
    try:
        return cls.model_validate(dict(values), context=info.context)
    except pydantic.ValidationError as error:
        raise NestedConfigError(problems(cls, error)) from None


ModelField = Annotated[AnyModelConfig, pydantic.BeforeValidator(_resolve)]
"""A field that holds the config of any model, chosen by its `kind`."""
