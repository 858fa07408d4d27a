"""The pages' Python blocks: they parse, and what they import from this project exists."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = ("agent_vllm", "trl_integration")


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def missing_imports(block):
    nodes = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    return [
        f"{node.module}.{alias.name}"
        for node in nodes
        if (node.module or "").split(".")[0] in OURS
        for alias in node.names
        if not hasattr(importlib.import_module(node.module or ""), alias.name)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_that_a_page_imports_exist(page):
    assert [name for block in python_blocks(page) for name in missing_imports(block)] == []


def test_a_name_that_does_not_exist_is_found():
    block = "from agent_vllm import ChatFormat, NoSuchName\nimport torch"
    assert missing_imports(block) == ["agent_vllm.NoSuchName"]


def test_the_quickstart_has_blocks_to_check():
    assert len(python_blocks(ROOT / "docs" / "quickstart.md")) >= 4
