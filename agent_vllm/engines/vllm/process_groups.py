"""Keep vLLM's process groups apart from the learner's.

vLLM would take the process's default group as its world and make its groups from it, which every
rank of a learner would have to do at the same moment. Invariant: an engine in this process is alone
in its groups, and the learner's default group stays the default.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import ProcessGroup, destroy_process_group, distributed_c10d

_users: set[object] = set()  # open engines
_default: ProcessGroup | None = None  # theirs; only this process is in it


@contextmanager
def own_default_group() -> Iterator[None]:
    """Make vLLM's group the default inside the block; none until vLLM has made it."""
    global _default
    learners = distributed_c10d.GroupMember.WORLD
    distributed_c10d._update_default_pg(_default)
    try:
        yield
    finally:
        _default = distributed_c10d.GroupMember.WORLD
        distributed_c10d._update_default_pg(learners)


def acquire(engine: object) -> None:
    """Register an engine that is about to be built; open engines share the groups."""
    _users.add(engine)


def release(engine: object) -> None:
    """Unregister an engine; destroy the groups with the last one."""
    global _default
    _users.discard(engine)
    if _users or _default is None:
        return
    from vllm.distributed import parallel_state

    with own_default_group():
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
    destroy_process_group(_default)  # by name: as the default it would take the learner's along
    _default = None
