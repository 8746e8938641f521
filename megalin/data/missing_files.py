"""Missing shards and tokenizer of a run, with the commands that make them."""

from __future__ import annotations

from pathlib import Path

from megalin.data.config import SPLITS, DataConfig
from megalin.data.shards.indexed_dataset import bin_path, idx_path
from megalin.errors import DataError

_LISTED = 6
"""Missing files in a message."""


def check_files(config: DataConfig) -> None:
    """Checks that the shards of all splits and the tokenizer exist, if the config says how to make them; without
    `preparation` the first file that cannot be opened is reported there.

    Raises:
        DataError: naming the missing files and the commands of `preparation`.
    """
    if not config.preparation:
        return
    prefixes = dict.fromkeys(path for split in SPLITS if config.has(split) for path in config.paths(split))
    files = [file for prefix in prefixes for file in (bin_path(prefix), idx_path(prefix))]
    if config.tokenizer not in (None, "bytes"):
        files.append(Path(config.tokenizer))
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise DataError(
            f"no such file: {', '.join(missing[:_LISTED])}{more}; a run reads them from the working folder. Make them "
            "with\n" + "\n".join(f"  {command}" for command in config.preparation)
        )
