"""A byte-level BPE trained on text: `megalin data train-tokenizer`."""

import sys

from megalin.__main__ import data_command

main = data_command("train-tokenizer")

if __name__ == "__main__":
    sys.exit(main())
