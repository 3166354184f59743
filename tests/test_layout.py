"""No file and no function is too long to be read in one go. Who imports whom is held by `make lint`."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "nonlocal_det"
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 450
MOST_LINES_OF_A_FUNCTION = 60


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MOST_LINES
    functions = (
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES_OF_A_FUNCTION} == {}
