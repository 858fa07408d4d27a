"""For tests of your own tools, environments and rewards: no model, every token known.

`ScriptedRolloutEngine` says what you tell it; `FaultyEngine` and `faulty` make an engine or a tool
misbehave, by a seed, so that you see what your rewards and your training make of it:

```python
engine = FaultyEngine(ScriptedRolloutEngine(tokenizer, turns), {Fault.REQUEST_ERROR: 0.2}, seed=1)
tools = [faulty(search, raise_share=0.1, odd_share=0.2, seed=1)]
for trajectory in rollout_batch(engine, chat, messages_batch, [tools] * len(messages_batch)):
    assert 0.0 <= my_reward(trajectory.completion_messages) <= 1.0
```

Nothing here runs in training.
"""

from agent_vllm.testing.faults import ODD_VALUES, Fault, FaultyEngine, faulty
from agent_vllm.testing.scripted import ScriptedRolloutEngine

__all__ = ["ODD_VALUES", "Fault", "FaultyEngine", "ScriptedRolloutEngine", "faulty"]
