"""Full garbage collections while rollouts run, and afterwards."""

import gc

import pytest
from fakes import user

from agent_vllm.errors import EngineError
from agent_vllm.rollout import rollout_batch
from agent_vllm.rollout.garbage import rare_full_collections


@pytest.fixture
def before():
    thresholds = gc.get_threshold()
    gc.set_threshold(701, 11, 12)
    yield (701, 11, 12)
    gc.set_threshold(*thresholds)


def test_full_collections_are_rare_until_the_last_rollout_ends(before):
    with rare_full_collections():
        with rare_full_collections():
            assert gc.get_threshold() == (701, 11, 120)
        assert gc.get_threshold() == (701, 11, 120)
    assert gc.get_threshold() == before


def test_a_rollout_leaves_the_collector_as_it_was(before, chat, scripted):
    seen = []

    def script(request):
        seen.append(gc.get_threshold())
        return EngineError("no answer")

    rollout_batch(scripted(script), chat, [user("one")])
    assert seen and set(seen) == {(701, 11, 120)}
    assert gc.get_threshold() == before
