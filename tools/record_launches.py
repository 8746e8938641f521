"""Records launches of the Triton kernels in tools/kernel_launches/launches.txt.

    python tools/record_launches.py --presets             # steps of every preset on every chip; needs no GPU
    MEGALIN_RECORD_LAUNCHES=seen.txt python -m pytest tests/ops
    python tools/record_launches.py --add seen.txt        # forms that no preset has

`MEGALIN_RECORD_LAUNCHES` works for tests/gpu too; without it a launch of a form that is not in the list fails the test.
Compile what was added with `python tools/compile_kernels.py --seal`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kernel_launches.launch import CHIPS
from kernel_launches.launch_list import LaunchList
from kernel_launches.preset_steps import launches_of_presets
from kernel_launches.recorder import read_recorded

from megalin.model.presets import preset_names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", action="store_true", help="record the steps of the presets again")
    parser.add_argument("--add", nargs="+", type=Path, default=[], metavar="FILE", help="add the forms of these files")
    arguments = parser.parse_args()
    launches = LaunchList.read()
    before = set(launches.entries)
    if arguments.presets:
        launches.replace_steps(launches_of_presets(preset_names(), CHIPS))
    for path in arguments.add:
        launches.add_forms(read_recorded(path))
    launches.write()
    after = set(launches.entries)
    print(f"{len(after)} launches: {len(after - before)} added, {len(before - after)} removed")


if __name__ == "__main__":
    main()
