"""The pages' Python blocks: they parse, and what they import from this project exists."""

import ast
import importlib
import re

import pytest
from paths import ROOT

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


# ---- the FAQ quotes real messages ----

FROM_OTHER_LIBRARIES = ("Your setup doesn't support bf16/gpu.", "Triton is installed, but")


def quoted_messages(page):
    """The messages in the headings; what stands for values is "..."."""
    for heading in re.findall(r"^### (.*)$", page, re.MULTILINE):
        for double, single in re.findall(r"`` (.+?) ``|(?<!`)`([^`]+)`(?!`)", heading):
            message = double or single
            if " " in message and not message.startswith(FROM_OTHER_LIBRARIES):
                yield message


def texts_of(node):
    """The string constants of a module; a formatted value is "..."."""
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        elif isinstance(child, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "..."
                for part in child.values
            )


def test_messages_of_the_faq_are_raised_somewhere():
    files = [file for package in OURS for file in (ROOT / package).rglob("*.py")]
    known = "\n".join(
        text for file in files for text in texts_of(ast.parse(file.read_text("utf-8")))
    )
    messages = list(quoted_messages((ROOT / "docs" / "faq.md").read_text("utf-8")))
    assert len(messages) > 30
    pieces = [piece.strip() for message in messages for piece in message.split("...")]
    assert [piece for piece in pieces if piece not in known] == []
