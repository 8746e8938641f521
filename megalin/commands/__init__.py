"""The commands of the command line, one module each: parse arguments, call the library, print."""

from megalin.commands import (
    config,
    coordinate_check,
    eval,
    export,
    fit,
    generate,
    import_,
    inspect,
    ladder,
    lm_eval,
    params,
    plan,
    report,
    reproduce,
    sweep,
    train,
    verify,
)
from megalin.commands.base import Command

COMMANDS: dict[str, Command] = {
    "train": train.COMMAND,
    "eval": eval.COMMAND,
    "lm-eval": lm_eval.COMMAND,
    "generate": generate.COMMAND,
    "report": report.COMMAND,
    "ladder": ladder.COMMAND,
    "fit": fit.COMMAND,
    "reproduce": reproduce.COMMAND,
    "sweep": sweep.COMMAND,
    "inspect": inspect.COMMAND,
    "export": export.COMMAND,
    "import": import_.COMMAND,
    "config": config.COMMAND,
    "verify": verify.COMMAND,
    "params": params.COMMAND,
    "plan": plan.COMMAND,
    "coordinate-check": coordinate_check.COMMAND,
}
"""Every command by its name on the command line."""
