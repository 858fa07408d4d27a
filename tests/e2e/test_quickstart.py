"""The quickstart notebook runs from top to bottom, inside a running event loop as notebooks are."""

import asyncio
import json
import sys

import pytest
from paths import EXAMPLES

NOTEBOOK = EXAMPLES / "quickstart.ipynb"


@pytest.mark.e2e
def test_every_cell_runs(agent_path, capsys, monkeypatch):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = {}

    async def run():
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)

    asyncio.run(run())
    assert len(names["trajectories"]) == 12
    assert "assistant:" in capsys.readouterr().out


def test_it_is_committed_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells)
