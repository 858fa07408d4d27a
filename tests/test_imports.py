"""What an import loads, seen from a fresh process."""

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT

PROBE = """
import json, sys

def loaded(name):
    return sorted(module for module in sys.modules if module.split(".")[0] == name)

import agent_vllm
import agent_vllm.inspect, agent_vllm.testing
core = {name: loaded(name) for name in ("vllm", "trl", "mcp", "aiohttp")}
from trl import GRPOTrainer  # TRL loads parts of vLLM itself, where it is installed
before = loaded("vllm")
import trl_integration, trl_integration.trainer
print(json.dumps({"core": core, "added_vllm": sorted(set(loaded("vllm")) - set(before))}))
"""


@pytest.fixture(scope="module")
def found():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_agent_vllm_loads_neither_engines_nor_trl_nor_what_a_part_alone_needs(found):
    assert found["core"] == {"vllm": [], "trl": [], "mcp": [], "aiohttp": []}


def test_trl_integration_loads_no_more_of_vllm_than_trl_does(found):
    assert found["added_vllm"] == []
