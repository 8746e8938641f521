"""Requests of the choice tasks: `megalin data get-evaluation-data`."""

import sys

from megalin.__main__ import data_command

main = data_command("get-evaluation-data")

if __name__ == "__main__":
    sys.exit(main())
