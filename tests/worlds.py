"""Environments as TRL documents them, one of each kind, and some that fail."""

import asyncio
import threading
import time


class Counter:
    """Keeps a state between calls; `reset` says nothing; rewards read its attribute."""

    def __init__(self):
        self.value = 0

    def reset(self, **kwargs) -> None:
        self.value = 0

    def increment(self, step: int) -> int:
        """
        Add to the counter.

        Args:
            step: How much to add.

        Returns:
            The counter's value.
        """
        self.value += step
        return self.value


class AsyncCounter(Counter):
    """The same, all of it async; it keeps something that belongs to its event loop."""

    def __init__(self):
        super().__init__()
        self.loop = None

    async def reset(self, **kwargs) -> None:
        await asyncio.sleep(0)
        self.loop = self.loop or asyncio.get_running_loop()
        self.value = 0

    async def increment(self, step: int) -> int:
        """
        Add to the counter.

        Args:
            step: How much to add.
        """
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is self.loop
        self.value += step
        return self.value

    async def get_reward(self) -> float:
        assert asyncio.get_running_loop() is self.loop
        return float(self.value)


class WordGame:
    """A game with an end: `reset` gives the task, a guess after the end is an error."""

    def __init__(self):
        self.reward = None

    def reset(self, word="crane", **kwargs) -> str:
        self._word, self._num_guesses = word, 0
        self.reward, self.done = 0.0, False
        return "\nGuess the five letters."

    def guess(self, word: str) -> str:
        """
        Make a guess.

        Args:
            word: Five letters.

        Returns:
            G, Y or X for each letter.
        """
        if self.done:
            raise ValueError("The game is over.")
        self._num_guesses += 1
        self.reward = float(word == self._word)
        self.done = word == self._word or self._num_guesses == 6
        return "".join(map(self._mark, word, self._word))

    def _mark(self, letter: str, right: str) -> str:
        return "G" if letter == right else "Y" if letter in self._word else "X"


class SelfScoring(Counter):
    """Knows its own reward."""

    def get_reward(self) -> float:
        return float(self.value)


class Trouble:
    """Fails where its row's `trouble` says so; else its reward is the row's `index`.

    Of `made` instances each notes the rows that it was reset with.
    """

    made: list["Trouble"]  # set by whoever uses it
    release = threading.Event()  # what hangs waits for it

    def __init__(self):
        self.indices = []
        self.made.append(self)

    def reset(self, index=0, trouble=None, **kwargs):
        self.indices.append(index)
        self._index, self._trouble = index, trouble
        self.reward = float(index)
        return self._at("reset")

    def look(self) -> str:
        """Look around."""
        return self._at("look") or f"seen {self._index}"

    def get_reward(self):
        said = self._at("get_reward")
        return self.reward if said is None else said

    def _at(self, method):
        place, kind = self._trouble or (None, None)
        if place != method:
            return None
        if kind == "raises":
            raise RuntimeError("lost the connection")
        if kind == "exits":
            raise SystemExit(3)
        if kind == "sleeps":
            self.release.wait(20)
        if kind == "spins":
            end = time.monotonic() + 20
            while time.monotonic() < end:
                pass
        return {"number": 7, "text": "a lot", "nan": float("nan"), "inf": float("inf")}.get(kind)


class AsyncTrouble(Trouble):
    async def reset(self, **row):
        return await self._async(lambda: Trouble.reset(self, **row))

    async def get_reward(self):
        return await self._async(lambda: Trouble.get_reward(self))

    async def _async(self, work):
        await asyncio.sleep(0)
        return work()
