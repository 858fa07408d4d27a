"""Show the progress of one rollout.

A terminal or notebook gets a line that moves. When the rollout ends, a plain line is printed: the
only one that a file or a dumb terminal gets.
"""

import sys
import threading
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text
from tqdm import tqdm

from agent_vllm.rollout import RolloutStatus

_REFRESH_S = 0.2


class RolloutProgress:
    """Show a `RolloutStatus` while the block runs.

    Args:
        status: what to show.
        title: printed before the figures, such as "rollout at step 3".
        enabled: False shows nothing.
        console: where to show it (default: standard error, next to TRL's progress bar).
    """

    def __init__(
        self,
        status: RolloutStatus,
        title: str,
        *,
        enabled: bool = True,
        console: Console | None = None,
    ) -> None:
        self._status = status
        self._title = title
        self._enabled = enabled
        self._console = console or Console(file=sys.stderr)
        self._live: Live | None = None
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        if self._enabled and self._can_move:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
            threading.Thread(target=self._refresh, daemon=True, name="rollout progress").start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._live is not None:
            self._live.stop()
        if self._enabled and error is None:
            with tqdm.external_write_mode(file=self._console.file):  # pauses TRL's bar
                self._console.print(self.line(), highlight=False, soft_wrap=True)

    @property
    def _can_move(self) -> bool:
        console = self._console
        return console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)

    def line(self) -> str:
        """Return the figures in one line; a finished rollout leaves out those of a running one."""
        status = self._status
        rate = status.num_sampled_tokens / max(status.elapsed_s, 1e-9)
        parts = [f"{self._title}: {status.num_finished}/{status.num_trajectories} finished"]
        is_running = status.num_finished < status.num_trajectories
        if is_running:
            parts.append(f"{status.num_generating} generating, {status.num_in_tools} in tools")
        if status.num_turns:
            mean = status.num_turns / status.num_trajectories
            parts.append(f"{mean:.1f} turns (most {status.max_turn})")
        parts.append(f"{status.num_sampled_tokens} tokens, {rate:.0f}/s")
        if is_running and (call := status.slowest_call) is not None:
            parts.append(f"{call[0]} has run {call[1]:.1f} s")
        parts.append(f"{status.elapsed_s:.1f} s")
        if is_running and (left_s := status.remaining_s) is not None:
            parts.append(f"about {left_s:.0f} s left")
        return ", ".join(parts)

    def _refresh(self) -> None:
        while self._live is not None and not self._stop.wait(_REFRESH_S):
            self._live.update(Text(self.line(), overflow="ellipsis", no_wrap=True), refresh=True)
