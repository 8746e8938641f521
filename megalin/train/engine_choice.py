"""Choice of a run's engine."""

from __future__ import annotations

from collections.abc import Sequence

from megalin.parallel.mesh import Mesh
from megalin.train.config import RunConfig
from megalin.train.engine import Engine, FullyShardedEngine
from megalin.train.update_hooks import UpdateHook


def make_engine(config: RunConfig, mesh: Mesh, hooks: Sequence[UpdateHook]) -> Engine:
    """The engine that `train.engine` names."""
    if config.train.engine == "fsdp2":
        return FullyShardedEngine(config, mesh, hooks)
    from megalin.train.deepspeed_engine import DeepSpeedEngine  # imports a library that other runs do not need

    return DeepSpeedEngine(config, mesh, hooks)
