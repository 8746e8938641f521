"""Shards merged into one, or one split: `megalin data merge`."""

import sys

from megalin.__main__ import data_command

main = data_command("merge")

if __name__ == "__main__":
    sys.exit(main())
