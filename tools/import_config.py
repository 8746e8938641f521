"""A config of Megatron-LM, gpt-neox or DeepSpeed as TOML: `megalin data import-config`."""

import sys

from megalin.__main__ import data_command

main = data_command("import-config")

if __name__ == "__main__":
    sys.exit(main())
