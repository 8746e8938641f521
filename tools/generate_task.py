"""Examples of a generated task as a token shard: `megalin data generate-task`."""

import sys

from megalin.__main__ import data_command

main = data_command("generate-task")

if __name__ == "__main__":
    sys.exit(main())
