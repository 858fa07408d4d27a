"""Live progress of one rollout: a moving line on a terminal, else one plain line at its end."""

import sys
import threading
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from agent_vllm.rollout import RolloutStatus

_REFRESH_S = 0.2


class RolloutProgress:
    """Shows a `RolloutStatus` while the block runs.

    Args:
        status: what to show.
        title: said before the figures, such as "rollout at step 3".
        enabled: False shows nothing.
        console: where to show it; standard error by default, beside TRL's bar.
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
        if self._enabled and self._console.is_terminal and not self._console.is_dumb_terminal:
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
            self._console.print(self.line(), highlight=False, soft_wrap=True)

    def line(self) -> str:
        """The figures in one line."""
        status = self._status
        rate = status.num_sampled_tokens / max(status.elapsed_s, 1e-9)
        parts = [f"{self._title}: {status.num_finished}/{status.num_trajectories} finished"]
        if status.num_finished < status.num_trajectories:
            parts.append(f"{status.num_generating} generating, {status.num_in_tools} in tools")
        parts.append(f"{status.num_sampled_tokens} tokens, {rate:.0f}/s")
        return ", ".join(parts) + f", {status.elapsed_s:.1f} s"

    def _refresh(self) -> None:
        while self._live is not None and not self._stop.wait(_REFRESH_S):
            self._live.update(Text(self.line(), overflow="ellipsis", no_wrap=True), refresh=True)
