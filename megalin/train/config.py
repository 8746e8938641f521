"""The config of a run: model, data, mesh, optimizer, schedule and training loop, validated together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import pydantic

from megalin.checkpoint.config import CheckpointConfig
from megalin.config import REFUSED, SILENT, Change, Config, parse
from megalin.data.config import DataConfig
from megalin.model.config import EncoderConfig, ModelField, max_positions_key
from megalin.optim.config import OptimizerConfig, ScheduleConfig
from megalin.parallel.config import ParallelConfig
from megalin.train.config_file import CONFIG_NAME, own_mixers, read_config, resolve
from megalin.train.encoder_data import encoder_data_problems
from megalin.train.evaluation_config import EvaluationConfig
from megalin.train.graph_choice import config_obstacles
from megalin.train.precision import LossScaleConfig, float8_problems, loss_scale_problems
from megalin.train.reduction import tree_problems
from megalin.train.weights_and_biases import LoggingConfig


class TrainConfig(Config):
    """The training loop."""

    on_change: ClassVar[Change | None] = "reported"
    engine: Literal["fsdp2", "deepspeed"] = "fsdp2"
    """Library that shards weights and steps the optimizer. fsdp2: torch's fully_shard. deepspeed: DeepSpeed's ZeRO,
    stage parallel.zero; not with pp or shard."""
    deepspeed_config: str | None = pydantic.Field(default=None, min_length=1)
    """DeepSpeed JSON for that engine. Its keys that this config determines must agree with it, be left out, or be
    "auto"; the run folder keeps the JSON as passed to the engine."""
    steps: int = pydantic.Field(ge=1, le=10**12)
    """Optimizer steps of the whole run."""
    global_batch_size: Annotated[int, REFUSED] = pydantic.Field(ge=1, le=10_000_000)
    """Samples per step over all ranks; gradients accumulate if it exceeds micro_batch_size times the data axis."""
    micro_batch_size: int = pydantic.Field(ge=1)
    """Samples that a rank processes at a time."""
    seed: Annotated[int, REFUSED] = pydantic.Field(default=0, ge=0)
    """Seed of the initial weights and of the sample order."""
    initial_weights: Annotated[str | None, REFUSED] = pydantic.Field(default=None, min_length=1)
    """Run folder whose weights the run starts from, made by `megalin train` or `megalin import` on any mesh: its newest
    checkpoint, or with RUN@STEP that of a step. Optimizer state, schedule and samples start new. Tensors of new layers
    are drawn from the seed, an encoder's longer table of positions repeats the shorter one, another shape is refused;
    initial_weights.json lists them. Not read where the run resumes."""
    branch_from: Annotated[str | None, REFUSED] = pydantic.Field(default=None, min_length=1)
    """Run folder, or RUN@STEP, whose newest checkpoint or that of a step this run continues in a folder of its own:
    weights, optimizer state and samples, under its own schedule and number of steps. It ends as a run without the key,
    bit for bit, if both runs agree up to that step. Not read where the run resumes."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Compute dtype; weights and optimizer state are fp32 shards, gradients are reduced in fp32. float16: with dynamic
    loss scaling."""
    reduction: Literal["collective", "tree"] = "collective"
    """Order in which a step's gradients are summed. collective: that of the process group's reductions, which depends
    on the number of ranks. tree: a fixed binary tree over the step's micro-batches, so that losses, gradient norms and
    weights have the same bits on 1, 2, 4, ... ranks, also of a run that resumes on another number. Needs a power of two
    of micro-batches a step, data parallelism alone with parallel.zero = 0 or 1, the fsdp2 engine, on CPUs
    OMP_NUM_THREADS=1, and memory for log2(micro-batches a rank) + 3 whole gradients in fp32; no CUDA graphs."""
    loss_scale: LossScaleConfig | None = None
    """Loss scaling of dtype = "float16"; left out: the defaults of its fields."""
    on_spike: Literal["warn", "skip", "rollback"] = "warn"
    """Reaction to a spike: a loss above the median of the last 128 steps by more than 10 of their median absolute
    deviations and 0.1 nat, or a gradient norm above 50 times their median and 100 deviations, from step 101 on. warn: a
    warning with the samples of the step. skip, with the fsdp2 engine only: its update is left out, too, on every rank;
    the schedule, the samples and the ledger count the step. rollback, with the fsdp2 engine and data.order = "megalin":
    the newest checkpoint before it, of those of checkpoint.every_steps and keep_steps, is restored, the steps since are
    undone, and their batches, with that of the spike, are left out of the run; before the first one as skip."""
    max_rollbacks: Annotated[int, SILENT] = pydantic.Field(default=3, ge=0)
    """Rollbacks of the whole run; the next spike ends it with exit code 8. 0: the first spike does."""
    matmul_dtype: Literal["float8"] | None = None
    """Dtype of the matmuls of the blocks' wide linear layers. float8: y = x W^T and dx = dy W of e4m3 numbers with a
    power-of-two scale for each row; needs dtype = "bfloat16", and on GPUs compute capability 8.9. Gradients of weights,
    optimizer state, collectives, the head, low-rank and narrow maps stay as they are; so do evaluation and generation
    of a finished run. Left out: dtype."""
    float8_weight_gradient: bool = False
    """Computes the gradients of those layers' weights in FP8 too. Their scales depend on the tokens that a rank
    processes at a time, so the result depends on micro_batch_size and on the data and context-parallel axes."""
    recompute: bool = False
    """Recomputes each block's activations in the backward instead of keeping them."""
    compile: bool = False
    """Compiles blocks (torch.compile, one graph per kind of block). On a GPU two compilations may differ in the last
    bits; processes that share inductor's cache (TORCHINDUCTOR_CACHE_DIR) agreed."""
    cuda_graphs: Annotated[Literal[True, False, "auto"], SILENT] = "auto"
    """Captures a step's forwards and backwards in one CUDA graph after the third step, for models whose kernels are too
    short for the host to launch in time; the bits are the same. The graph's memory stays reserved: an evaluation needs
    memory of its own. Not with pp, the deepspeed engine, or, on several ranks, mixers for which the host reads document
    boundaries; on one they drop the graph in a step of more or longer documents than before, or of other micro-batches
    that are one document a sequence, and the next step captures it again. true: in any other run, and compiled blocks
    of tensor parallelism start their collectives early. auto: on one GPU, if a step has at most 32 micro-batches, no
    mixer of another package and no wait of the host for the GPU, if 1.1 times its memory is free, and if the graph adds
    at most 10 % or 256 MiB to what eager steps reserve; a line at the start of the run, and one after three steps, say
    which of these is missing. With less than 1.5 times its memory, evaluations drop the graph, and the next step
    captures it again."""
    evaluate_every_steps: Annotated[int | None, SILENT] = pydantic.Field(default=None, ge=1)
    """Steps between evaluations on the validation split; left out: only after the last step."""
    evaluate_batches: int | None = pydantic.Field(default=None, ge=1)
    """Batches of global_batch_size samples per evaluation, also after the last step; left out: 1,000 samples. The first
    samples of the split, or all if there are fewer; `megalin eval` reads all."""
    max_label_fraction: Annotated[float, SILENT] = pydantic.Field(default=1.0, gt=0.0, le=1.0)
    """Largest fraction of the tokens of a micro-batch on a rank that have a label, for data with label masks: the head
    and its loss are computed for so many rows, those of the labelled tokens, and not for all tokens. A micro-batch with
    more labels ends the run before its step. Not for encoders, whose head computes the masked tokens only."""
    log_every_steps: Annotated[int, SILENT] = pydantic.Field(default=10, ge=1)
    """Steps between progress lines if the output is not a terminal; every step is written to metrics.jsonl."""
    compare_replicas_every_steps: Annotated[int, SILENT] = pydantic.Field(default=50, ge=0)
    """Steps between comparisons of the copies that several ranks hold of weights and moments: with parallel.shard or
    zero = 0, of tensors that tp does not divide, of weights that pipeline stages share; and of constants, such as decay
    slopes, which all data ranks hold. They are compared before each checkpoint too. Copies that differ end the run
    (exit code 11); the message names ranks and tensors. 0: never. With the deepspeed engine, constants alone."""
    hang_timeout_seconds: Annotated[float, SILENT] = pydantic.Field(default=300.0, ge=1.0, le=1e9)
    """Longest time that a rank may make no progress in a step, or be stopped: then it is named and all ranks leave with
    exit code 7. A step may take three times the median of the last ones, if that is longer. Of a run of one process
    only the wait for its samples ends."""
    phase_timeout_seconds: Annotated[float, SILENT] = pydantic.Field(default=1800.0, ge=1.0, le=1e9)
    """The same limit for a start, a first step, the capture of a CUDA graph, an evaluation and a checkpoint, also
    for one that is written in the background."""
    stop_after_steps: Annotated[int | None, SILENT] = pydantic.Field(default=None, ge=1)
    """Saves and stops after this step, to resume later; the schedule still counts on `steps`."""


class RunConfig(Config):
    """Everything that determines a run."""

    model: ModelField
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        problems = [f"schedule.{problem}" for problem in self.schedule.problems(self.train.steps)]
        train, parallel, length = self.train, self.parallel, self.data.sequence_length
        if train.global_batch_size % train.micro_batch_size:
            problems.append(
                f"train.global_batch_size = {train.global_batch_size} is not divisible by train.micro_batch_size = "
                f"{train.micro_batch_size}; use a multiple of {train.micro_batch_size}"
            )
        if problem := parallel.length_problem(length):
            problems.append(f"data.sequence_length = {length} {problem}")
        if train.stop_after_steps is not None and train.stop_after_steps > train.steps:
            problems.append(
                f"train.stop_after_steps = {train.stop_after_steps} is beyond train.steps = {train.steps}; "
                "lower it or leave it out"
            )
        if problem := parallel.split_backward_problem(recompute=train.recompute, compiled=train.compile):
            problems.append(f"parallel.{problem}")
        for number, phase in enumerate(self.data.phases):
            if phase.from_step >= train.steps:
                problems.append(
                    f"data.phases.{number}.from_step = {phase.from_step} is not below train.steps = {train.steps}; "
                    "lower it or remove the phase"
                )
        problems += self._engine_problems() + self._graph_problems() + self._kind_problems() + self._rollback_problems()
        problems += float8_problems(train, parallel, length) + loss_scale_problems(train)
        problems += tree_problems(self)
        problems += self.evaluation.problems() + self.checkpoint.problems(self.train.steps)
        if train.branch_from is not None and train.initial_weights is not None:
            problems.append(
                f"train.branch_from = {train.branch_from!r} continues a run with its optimizer state, and "
                "train.initial_weights starts a new one; remove one of them"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _engine_problems(self) -> list[str]:
        """Settings that the engine does not support on any number of ranks."""
        train, parallel = self.train, self.parallel
        if train.engine == "fsdp2":
            if train.deepspeed_config is None:
                return []
            return [
                f'train.deepspeed_config = {train.deepspeed_config!r}, but train.engine = "fsdp2" reads none; remove '
                'it, or use engine = "deepspeed"'
            ]
        problems = []
        if train.on_spike != "warn":
            problems.append(
                f'train.on_spike = "{train.on_spike}" with train.engine = "deepspeed", which decides on its updates '
                'itself; leave it out (a warning), or use engine = "fsdp2"'
            )
        if parallel.pp > 1:
            problems.append(
                f'parallel.pp = {parallel.pp} with train.engine = "deepspeed", whose pipelines need consecutive '
                'layers without shared parameters; use engine = "fsdp2", or only tp, cp and zero'
            )
        if parallel.shard is not None:
            problems.append(
                f'parallel.shard = {parallel.shard} with train.engine = "deepspeed", which shards over the whole data '
                'axis; leave it out (parallel.zero = 0 shards nothing), or use engine = "fsdp2"'
            )
        return problems

    def _rollback_problems(self) -> list[str]:
        """Settings that leave a rollback without a checkpoint or without samples."""
        if self.train.on_spike != "rollback":
            return []
        problems = []
        saved = [*self.checkpoint.keep_steps, self.checkpoint.every_steps]
        if not any(step is not None and step < self.train.steps for step in saved):
            problems.append(
                'train.on_spike = "rollback" restores a checkpoint, and the only one is that of the last step; set '
                'checkpoint.every_steps, or use on_spike = "skip"'
            )
        if self.data.order == "megatron":
            problems.append(
                'train.on_spike = "rollback" with data.order = "megatron", which has no samples beyond those of '
                'train.steps to replace the ones left out; use on_spike = "skip", or order = "megalin"'
            )
        return problems

    def _graph_problems(self) -> list[str]:
        """Settings that prevent the capture of a CUDA graph on any number of ranks."""
        if self.train.cuda_graphs is not True:
            return []
        return [
            f"train.cuda_graphs = true with {obstacle.cause}; use cuda_graphs = false, or {obstacle.remedy}"
            for obstacle in config_obstacles(self)
        ]

    def _kind_problems(self) -> list[str]:
        """Mismatches between the kinds of model and data."""
        model, data = self.model, self.data
        problems = []
        if model.max_positions is not None and data.sequence_length > model.max_positions:
            problems.append(
                f"data.sequence_length = {data.sequence_length} is more than {max_positions_key(model)} = "
                f"{model.max_positions}; lower it, or raise max_positions"
            )
        if not isinstance(model, EncoderConfig):
            tables = [name for name in ("masking", "classification") if getattr(data, name) is not None]
            problems += [
                f'data.{name} makes samples for an encoder, but model.kind = "decoder"; remove one of them'
                for name in tables
            ]
            return problems
        problems += encoder_data_problems(model, data)
        if self.train.max_label_fraction < 1.0:
            problems.append(
                f"train.max_label_fraction = {self.train.max_label_fraction} is for decoders; an encoder's head "
                "computes the masked tokens only: leave it out"
            )
        return problems


def load_run_config(path: str | Path, overrides: Sequence[str]) -> RunConfig:
    """Reads the user's config file with its base, expands the model's preset and applies dotted overrides. Mixers of
    other packages that it names are imported.

    Raises:
        ConfigError: naming every problem at once.
    """
    values = resolve(read_config(path), overrides)
    return parse(RunConfig, values, str(path), context=own_mixers(path, values))


def load_saved_config(folder: str | Path, overrides: Sequence[str], mixers: Collection[str] = ()) -> RunConfig:
    """Reads the config of a run folder, as `load_run_config`; of mixers of other packages only `mixers` are imported
    (`external_module`)."""
    path = Path(folder) / CONFIG_NAME
    return parse(RunConfig, resolve(read_config(path), overrides), str(path), context=mixers)
