"""Base of decoders and encoders: embedding, input layers, blocks and norm, and their parameter and FLOP counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar, cast

from torch import Tensor, nn

from megalin.layers.dropout import DropoutSeed, apply_dropout, dropout_at, input_site
from megalin.layers.mixers.base import BuildContext, FullPrecision, Mixer, update_derived_buffers
from megalin.layers.norms import build_norm
from megalin.model.block import Block
from megalin.model.config import BlockConfig, StackConfig
from megalin.ops.dropout import DropoutKeys
from megalin.parallel.context_parallel import ContextParallel
from megalin.parallel.embedding import VocabParallelEmbedding, VocabularyBias
from megalin.parallel.float8_layers import update_weight_magnitudes
from megalin.parallel.tensor_parallel import TensorParallel

ConfigT = TypeVar("ConfigT", bound=StackConfig)


class Stage(NamedTuple):
    """A pipeline stage of a model: some sub-layers; the embedding on the first, norm and head on the last.

    Each stage holds the modules that its blocks share.
    """

    number: int
    num_stages: int
    sublayers: range
    """Its sub-layers, by their numbers in the model. The first and the last block may be incomplete."""

    @property
    def is_first(self) -> bool:
        """True for the stage with the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """True for the stage with the norm and the head."""
        return self.number == self.num_stages - 1


class BaseModel(nn.Module, Generic[ConfigT]):
    """Embedding, input layers, blocks and norm; subclasses add heads and the forward.

    Built on the meta device; then it is sharded (`shard_model`), materialised (`to_empty`) and initialised
    (`init_weights`).

    Attributes:
        head: the output embedding, where it is not tied to the input embedding.
        loss_names: the terms of the loss, in the order of the output's `loss_sums`.
        stage: the pipeline stage, by default the whole model. Modules of other stages are not built; module names are
            those of the whole model.

    Raises:
        ConfigError: sizes that the tensor-parallel axis does not divide, or a mixer without context parallelism on a
            context-parallel axis.
    """

    head: VocabParallelEmbedding | None
    loss_names: tuple[str, ...]

    def __init__(
        self,
        config: ConfigT,
        tp: TensorParallel | None,
        *,
        recompute: bool,
        cp: ContextParallel | None = None,
        stage: Stage | None = None,
        has_table: bool = True,
    ) -> None:
        """`has_table`: True where this stage holds the embedding, as input or as tied output."""
        super().__init__()
        self.config = config
        self.stage = stage = Stage(0, 1, range(config.num_sublayers)) if stage is None else stage
        self.tp = tp = TensorParallel() if tp is None else tp
        self.cp = cp = ContextParallel() if cp is None else cp
        width, std = config.hidden_size, config.init_std
        if has_table:
            self.embedding = VocabParallelEmbedding(config.vocab_size, width, tp=tp, std=std)
        self.dropout_seed = DropoutSeed() if max(config.embedding_dropout, config.hidden_dropout) > 0.0 else None
        self.embedding_dropout = dropout_at(config.embedding_dropout, input_site(0)) if stage.is_first else None
        self.input_layers = nn.ModuleDict()
        self.shared = nn.ModuleDict()
        self._shared_types: list[str] = []  # as in the config; names of modules hold no dots
        self.blocks = nn.ModuleList()
        first_scopes: dict[str, BuildContext] = {}  # of each mixer type, the same on every stage
        number = 0
        for layer, (path, block) in enumerate(config.blocks()):
            own = [index for index in range(len(block.sublayers)) if number + index in stage.sublayers]
            scope = BuildContext(width, layer, config.num_layers, tp, std, path, config.output_std, cp)
            scope = scope._replace(sublayer=number, hidden_dropout=config.hidden_dropout)
            number += len(block.sublayers)
            for sublayer in block.sublayers:
                first_scopes.setdefault(sublayer.type, scope)
            if own:
                self.blocks.add_module(str(layer), Block(block, scope, recompute=recompute, own=own))
            self._build_model_level(block, first_scopes, own)
        if stage.is_last:
            self.norm = build_norm(config.norm, width, config.norm_eps, tp)

    def _build_model_level(self, block: BlockConfig, scopes: Mapping[str, BuildContext], own: Sequence[int]) -> None:
        """Builds, once a mixer type, its shared module, on stages with such a sub-layer (`own` of the block's), and its
        input layer, on the stage with the embedding."""
        for index, sublayer in enumerate(block.sublayers):
            key, scope = sublayer.type.replace(".", "_"), scopes[sublayer.type]
            if index in own and key not in self.shared and (module := sublayer.shared_module(scope)) is not None:
                self.shared[key] = module
                self._shared_types.append(sublayer.type)
            if (
                self.stage.is_first
                and key not in self.input_layers
                and (layer := sublayer.input_layer(scope)) is not None
            ):
                self.input_layers[key] = layer

    def shared_tensors(self) -> dict[str, Tensor]:
        """The output of each mixer type's model-level module."""
        return {name: module() for name, module in zip(self._shared_types, self.shared.values(), strict=True)}

    def dropout_keys(self, draw: Tensor | None, tokens: Tensor) -> DropoutKeys | None:
        """Keys of this forward's dropout masks; None in eval mode and for a model without dropout.

        Args:
            draw: [B] int64, the numbers of the samples in the run; training with dropout needs them.
            tokens: [B, T/cp], read for its shape and device alone.
        """
        if self.dropout_seed is None or not self.training:
            return None
        assert draw is not None, "a training forward with dropout needs `draw`, the samples' numbers in the run"
        index = self.cp.positions(tokens)  # [T/cp]
        if self.tp.sequence_parallel:
            index = self.tp.local_slice(index, dim=0)  # [T/(cp tp)]
        keys: DropoutKeys = self.dropout_seed(draw, index)
        return keys

    def drop_embedding(self, x: Tensor, keys: DropoutKeys | None) -> Tensor:
        """The residual stream [B, T or T/tp, D] before the blocks, after dropout."""
        return apply_dropout(x, self.embedding_dropout, keys)

    def mixers(self) -> list[Mixer]:
        """Every mixer, blocks in order."""
        return [mixer for block in self.block_list() for mixer in block.mixers()]

    def block_list(self) -> list[Block]:
        """The blocks in order."""
        return cast(list[Block], list(self.blocks))

    def input_mixers(self) -> list[Mixer]:
        """The input layers in order."""
        return cast(list[Mixer], list(self.input_layers.values()))

    def full_precision_modules(self) -> list[nn.Module]:
        """The submodules whose parameters compute in fp32, because they feed exponentials or positions."""
        return [module for module in self.modules() if isinstance(module, FullPrecision)]

    def loss_sums(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[terms] the sum of each loss term, by a forward of `inputs` with labels that returns nothing else."""
        raise NotImplementedError

    def after_optimizer_step(self) -> None:
        """Updates what mixers and FP8 matmuls derive from weights, after an optimizer step and after loading them."""
        update_derived_buffers([*self.input_mixers(), *self.mixers()])
        update_weight_magnitudes(self)

    def no_decay_names(self) -> set[str]:
        """Global names of the parameters without weight decay: vectors (norm weights), biases (fused ones are
        [parts, out]) and those that compute in full precision."""
        precise = {id(p) for module in self.full_precision_modules() for p in module.parameters()}
        return {n for n, p in self.named_parameters() if p.dim() <= 1 or n.endswith(".bias") or id(p) in precise}

    def num_parameters(self) -> int:
        """Number of parameters of the full model, summed over ranks, without the padding of the vocabulary."""
        rows = [m.padded_parameters() for m in self.modules() if isinstance(m, VocabParallelEmbedding | VocabularyBias)]
        return sum(parameter.numel() for parameter in self.parameters()) - sum(rows)

    def num_embedding_parameters(self) -> int:
        """Number of parameters of the embeddings, and of an untied output embedding."""
        raise NotImplementedError

    def forward_flops(self, length: int) -> int:
        """Forward floating-point operations a token at `length` tokens; a multiply and an add count as two."""
        raise NotImplementedError

    def training_flops(self, length: int) -> int:
        """Forward and backward floating-point operations a token: three forwards. Recomputation is not counted."""
        return 3 * self.forward_flops(length)

    def stack_flops(self, length: int) -> int:
        """The part of `forward_flops` in input layers and blocks."""
        return sum(mixer.flops(length) for mixer in [*self.input_mixers(), *self.mixers()])
