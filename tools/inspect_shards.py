"""Summary of a token shard: `megalin data inspect`."""

import sys

from megalin.__main__ import data_command

main = data_command("inspect")

if __name__ == "__main__":
    sys.exit(main())
