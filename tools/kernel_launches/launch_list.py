"""The committed list of launches: those of every preset's steps, and one of each other form that tests run.

    [module.kernel] <seal> <chips>
    <launch> [@ <chips>] [spills <chip>:<bytes> ...]

The chips after a launch are those whose dispatcher makes it, all without the mark; `spills` are its bytes of stack a
thread where they exceed SPILL_LIMIT. The seal is a hash of the kernel's source and launches; they were compiled for the
chips after it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from .launch import CHIPS, KernelLaunch
from .sources import source_of, takes

PATH = Path(__file__).with_name("launches.txt")


HEADER = "# Launches of the Triton kernels, by tools/record_launches.py; seals and spills, by tools/compile_kernels.py."


class ListedLaunch(NamedTuple):
    """Chips of a launch, and the spills of its compilations."""

    chips: tuple[int, ...]
    spills: dict[int, int]
    """Chip -> bytes of stack a thread, above SPILL_LIMIT."""

    def suffix(self) -> str:
        """The entry after its launch in the file."""
        chips = "" if self.chips == CHIPS else " @ " + " ".join(map(str, self.chips))
        spills = "".join(f" {chip}:{stack}" for chip, stack in sorted(self.spills.items()))
        return chips + (" spills" + spills if spills else "")


class Seal(NamedTuple):
    """Hash of what was compiled of a kernel, and the chips that it was compiled for."""

    digest: str
    chips: tuple[int, ...]


UNSEALED = Seal("-", ())


class LaunchList:
    """Entries by launch, and the seals by kernel."""

    def __init__(self) -> None:
        self.entries: dict[KernelLaunch, ListedLaunch] = {}
        self.seals: dict[str, Seal] = {}

    @classmethod
    def read(cls, path: Path = PATH) -> LaunchList:
        """The list in a file."""
        found, kernel = cls(), ""
        for line in path.read_text("utf-8").splitlines():
            if line.startswith("["):
                name, digest, *compiled = line[1:].replace("]", "", 1).split()
                kernel, found.seals[name] = name, Seal(digest, tuple(map(int, compiled)))
            elif line and not line.startswith("#"):
                head, _, spills = line.partition(" spills ")
                text, _, chips_text = head.partition(" @ ")
                stacks = {int(chip): int(stack) for chip, stack in (pair.split(":") for pair in spills.split())}
                found.entries[KernelLaunch(kernel, text)] = ListedLaunch(
                    tuple(map(int, chips_text.split())) or CHIPS, stacks
                )
        return found

    def write(self, path: Path = PATH) -> None:
        """Writes the list, sorted."""
        lines = [HEADER]
        for kernel in self.kernels():
            digest, chips = self.seals.get(kernel, UNSEALED)
            own = [launch.text + self.entries[launch].suffix() for launch in self.of_kernel(kernel)]
            lines += ["", " ".join([f"[{kernel}]", digest, *map(str, chips)]), *own]
        path.write_text("\n".join(lines) + "\n", "utf-8")

    def kernels(self) -> list[str]:
        """Kernels with launches, sorted."""
        return sorted({launch.kernel for launch in self.entries})

    def of_kernel(self, kernel: str) -> list[KernelLaunch]:
        """Launches of a kernel, sorted."""
        return sorted(launch for launch in self.entries if launch.kernel == kernel)

    def digest(self, kernel: str) -> str:
        """Hash of the kernel's source and launches as they are now."""
        launches = (f"{launch.text} {self.entries[launch].chips}" for launch in self.of_kernel(kernel))
        content = "\n".join([source_of(kernel), *launches])
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def changed(self, chip: int) -> list[str]:
        """Kernels whose source or launches are not those that were compiled for `chip`."""
        seals = {kernel: self.seals.get(kernel, UNSEALED) for kernel in self.kernels()}
        return [name for name, (digest, chips) in seals.items() if chip not in chips or digest != self.digest(name)]

    def seal(self, kernel: str, chips: Iterable[int]) -> None:
        """Marks a kernel as compiled for `chips`, and for those of an earlier seal of the same source and launches."""
        digest, earlier = self.seals.get(kernel, UNSEALED)
        now = self.digest(kernel)
        self.seals[kernel] = Seal(now, tuple(sorted({*chips, *(earlier if digest == now else ())})))

    def replace_steps(self, steps: Mapping[KernelLaunch, Iterable[int]]) -> None:
        """Sets the launches of the presets' steps with their chips; removes launches of the same forms, and those whose
        arguments are not those of their kernel any more.

        Of launches that differ in hints on integers alone it keeps one, with the most multiples of 16: these load
        ahead of their use where the others may not, which takes the most shared memory.
        """
        chips: dict[KernelLaunch, set[int]] = {}
        longest: dict[KernelLaunch, KernelLaunch] = {}
        for launch in sorted(steps, key=lambda launch: (launch.text.count("/16"), launch)):
            longest[launch.without_hints()] = launch
            chips.setdefault(launch.without_hints(), set()).update(steps[launch])
        forms = {launch.form() for launch in steps}
        dependent = {launch.kernel for key, launch in longest.items() if chips[key] != set(CHIPS)}
        kept = {
            launch: entry._replace(chips=_chips_of(launch, dependent)) if entry.chips == CHIPS else entry
            for launch, entry in self.entries.items()
            if launch.form() not in forms and takes(*launch)
        }
        for key, launch in longest.items():
            spills = self.entries[launch].spills if launch in self.entries else {}
            kept[launch] = ListedLaunch(tuple(chip for chip in CHIPS if chip in chips[key]), spills)
        self.entries = kept

    def add_forms(self, launches: Iterable[KernelLaunch]) -> None:
        """Adds one launch of each form that is not in the list, the largest in size."""
        known = {launch.form() for launch in self.entries}
        fitting = sorted((launch for launch in launches if takes(*launch)), key=_size)
        new = {launch.form(): launch for launch in fitting if launch.form() not in known}
        dependent = {launch.kernel for launch, entry in self.entries.items() if entry.chips != CHIPS}
        for launch in new.values():
            self.entries[launch] = ListedLaunch(_chips_of(launch, dependent), {})


def _size(launch: KernelLaunch) -> tuple[int, KernelLaunch]:
    return sum(map(int, re.findall(r"\b[A-Z_]+=(\d+)", launch.text))), launch


def _chips_of(launch: KernelLaunch, dependent: set[str]) -> tuple[int, ...]:
    """Chips of a launch from the interpreter or a Hopper GPU: all, unless the dispatcher chooses by chip."""
    if "PDL=" in launch.text:
        return tuple(chip for chip in CHIPS if (chip >= 90) == ("PDL=True" in launch.text))
    if "NATIVE=True" in launch.text:
        return tuple(chip for chip in CHIPS if chip >= 89)
    return (90,) if launch.kernel in dependent else CHIPS
