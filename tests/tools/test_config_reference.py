"""The config reference in docs/configuration.md, against the output of its tool."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_page_is_what_the_tool_prints():
    command = [sys.executable, str(ROOT / "tools/config_reference.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == printed, "run python tools/config_reference.py > docs/configuration.md"
