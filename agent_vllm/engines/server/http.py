"""JSON over HTTP to one server.

Invariant: every call ends in time, and its error names the call and the server.
"""

from typing import Any

import aiohttp

from agent_vllm.errors import EngineError

CONTROL_TIMEOUT_S = 60.0  # a busy engine answers between two of its steps


class NoAnswerError(EngineError):
    """The connection failed, broke, or stayed silent: the server may be gone."""


class RefusedError(EngineError):
    """The server answered, with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class JsonClient:
    """Call one server, on the event loop of its session.

    Args:
        base_url: such as "http://127.0.0.1:8000".
    """

    def __init__(self, base_url: str, session: aiohttp.ClientSession) -> None:
        self.url = base_url.rstrip("/")
        self._session = session

    def __str__(self) -> str:
        return self.url

    async def get(self, path: str, **options: Any) -> Any:
        return await self._call("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Any:
        return await self._call("POST", path, json=body, **options)

    async def _call(
        self, method: str, path: str, *, timeout_s: float = CONTROL_TIMEOUT_S, **options: Any
    ) -> Any:
        what = f"{method} {self.url}{path}"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self.url + path, timeout=timeout, **options
            ) as response:
                if response.status != 200:
                    text = await response.text()
                    raise RefusedError(f"{what}: {response.status} {text:.500}", response.status)
                return await response.json()
        except TimeoutError as error:
            raise NoAnswerError(f"{what}: no answer within {timeout_s:g} s.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswerError(f"{what}: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise EngineError(f"{what}: the answer is no JSON: {error}") from error
