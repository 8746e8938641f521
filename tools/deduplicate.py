"""A corpus without duplicates: `megalin data deduplicate`."""

import sys

from megalin.__main__ import data_command

main = data_command("deduplicate")

if __name__ == "__main__":
    sys.exit(main())
