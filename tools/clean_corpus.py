"""A corpus cleaned by rules: `megalin data clean`."""

import sys

from megalin.__main__ import data_command

main = data_command("clean")

if __name__ == "__main__":
    sys.exit(main())
