"""A corpus filtered by the perplexity of a trained model: `megalin data score`."""

import sys

from megalin.__main__ import data_command

main = data_command("score")

if __name__ == "__main__":
    sys.exit(main())
