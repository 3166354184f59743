"""--help and wrong flags answer at once: parsers need neither PyTorch nor Detectron2."""

import subprocess
import sys
from pathlib import Path

import pytest

import nonlocal_det.tools

TOOLS = sorted(
    path.stem
    for path in Path(nonlocal_det.tools.__file__).parent.glob("*.py")
    if path.stem not in ("__init__", "command")
)
#: Runs a tool in a Python in which the slow packages cannot be imported.
CODE = """
import os, runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "detectron2"):
            print(f"{name} is imported", file=sys.stderr, flush=True)
            os._exit(1)

sys.meta_path.insert(0, Refuse())
runpy.run_module(f"nonlocal_det.tools.{sys.argv.pop(1)}", run_name="__main__", alter_sys=True)
"""


def test_the_tools_are_there():
    assert {"train", "demo", "compare", "benchmark", "check_dataset", "convert_checkpoint"} < set(TOOLS)


@pytest.mark.parametrize("tool", TOOLS)
def test_help_needs_no_slow_packages(tool):
    command = [sys.executable, "-c", CODE, tool, "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
