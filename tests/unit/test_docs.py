"""The pages' Python blocks: they parse, and what they import from this project exists."""

import ast
import importlib
import re
import shlex

import pytest
from paths import ROOT

from agent_vllm.cli import COMMANDS, main

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


# ---- the command lines ----


def command_lines(page):
    """Every `agent-vllm ...` of a page, in a block of shell or in a sentence."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if "agent-vllm" in line]
    lines += re.findall(r"`(agent-vllm [^\s`]+ [^`\n]+)`", text)
    for line in lines:
        words = [word.strip("[]") for word in shlex.split(line, comments=True)]
        program = next(index for index, word in enumerate(words) if word.endswith("agent-vllm"))
        yield words[program + 1 :]


LINES = {shlex.join(words): words for page in PAGES for words in command_lines(page)}


@pytest.mark.parametrize("line", LINES)
def test_a_documented_command_line_is_one(line, monkeypatch):
    ran = []
    for command in COMMANDS.values():
        module = importlib.import_module(command.module)
        monkeypatch.setattr(module, "run", lambda args: ran.append(args) or 0)
    if line == "--version":
        with pytest.raises(SystemExit, match="0"):
            main(LINES[line])
    else:
        assert main(LINES[line]) == 0 and len(ran) == 1


def test_the_pages_hold_command_lines_of_every_command():
    assert COMMANDS.keys() <= {words[0] for words in LINES.values()}


def test_a_command_line_that_is_none_is_noticed():
    with pytest.raises(SystemExit):
        main(["view", "rollouts.jsonl", "--no-such-option"])


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
