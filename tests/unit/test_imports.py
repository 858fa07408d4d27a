"""Check what an import loads, from a fresh process."""

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

from agent_vllm import *
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


def modules_after(code):
    """Modules that a fresh process has loaded once it has run the code."""
    program = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True,
        timeout=120, check=True,
    ).stdout  # fmt: skip
    return set(output.splitlines()[-1].split())


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_command_line_answers_without_loading_torch(option):
    loaded = modules_after(f"from agent_vllm.cli import main; main([{option!r}])")
    assert "agent_vllm.cli" in loaded
    assert not loaded & {"torch", "transformers", "numpy"}


def test_replay_explains_itself_without_loading_trl():
    loaded = modules_after("from agent_vllm.cli import main; main(['replay', '--help'])")
    assert "trl_integration.replay_command" in loaded
    assert "trl" not in loaded


def test_the_trainers_names_can_be_imported_and_others_are_refused():
    import trl_integration

    assert set(trl_integration.__all__) <= set(dir(trl_integration))
    assert trl_integration.AgentGRPOConfig.__name__ == "AgentGRPOConfig"
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        trl_integration.Trainer  # noqa: B018


def test_an_engine_is_loaded_when_it_is_first_used():
    engines = {f"agent_vllm.engines.{name}" for name in ("torch", "vllm.engine", "server.engine")}
    loaded = modules_after("from agent_vllm import RolloutEngine, rollout_batch")
    assert "agent_vllm.engines.base" in loaded and not loaded & engines
    assert not {name for name in loaded if name.startswith("agent_vllm.engines.learner")}
    loaded = modules_after("from agent_vllm import TorchRolloutEngine")
    assert loaded & engines == {"agent_vllm.engines.torch"}


def test_every_public_name_can_be_imported_and_others_are_refused():
    import agent_vllm

    assert {name for name in agent_vllm.__all__ if getattr(agent_vllm, name) is None} == set()
    assert set(agent_vllm.__all__) <= set(dir(agent_vllm))
    with pytest.raises(AttributeError, match="no attribute 'Rollouts'"):
        agent_vllm.Rollouts  # noqa: B018
