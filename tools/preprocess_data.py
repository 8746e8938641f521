"""Text tokenized into Megatron token shards, with Megatron's option names: `megalin data preprocess`."""

import sys

from megalin.__main__ import data_command

main = data_command("preprocess")

if __name__ == "__main__":
    sys.exit(main())
