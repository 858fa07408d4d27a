"""Call one server that may answer anything.

Invariant: every call ends in time, with an answer of the form that was asked for or with an error
that names the call, the server and what was wrong. Errors never show the API key.
"""

import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
from pydantic import ValidationError

from agent_vllm.engines.server.answers import ServerAnswer
from agent_vllm.errors import EngineError

AnswerT = TypeVar("AnswerT", bound=ServerAnswer)

CONTROL_TIMEOUT_S = 60.0  # a busy engine answers between two of its steps
_CONTROL_BYTES = 16 << 20  # of an answer; the largest is the ids of a text with all added tokens
_ERROR_BYTES = 4 << 10  # of an answer that is quoted
_SHOWN = 500  # characters


class NoAnswerError(EngineError):
    """The connection failed, broke, or stayed silent: the server may be gone."""


class RefusedError(EngineError):
    """The server answered, with an error or a redirect."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class KeyRefusedError(EngineError):
    """The server wants another API key."""


class JsonClient:
    """Call one server, on the event loop of its session.

    Args:
        base_url: such as "http://127.0.0.1:8000", as `server_url` returns it.
        api_key: sent as a bearer token with every call.
    """

    def __init__(
        self, base_url: str, session: aiohttp.ClientSession, *, api_key: str | None = None
    ) -> None:
        self.url = base_url
        self._session = session
        self._api_key = api_key

    def __str__(self) -> str:
        return self.url

    async def get(
        self,
        path: str,
        answer: type[AnswerT],
        *,
        params: Mapping[str, str] | None = None,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> AnswerT:
        return await self._call("GET", path, answer, None, params, timeout_s, _CONTROL_BYTES)

    async def post(
        self,
        path: str,
        answer: type[AnswerT],
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout_s: float = CONTROL_TIMEOUT_S,
        max_bytes: int = _CONTROL_BYTES,
    ) -> AnswerT:
        return await self._call("POST", path, answer, body, params, timeout_s, max_bytes)

    async def _call(
        self,
        method: str,
        path: str,
        answer: type[AnswerT],
        body: Any,
        params: Mapping[str, str] | None,
        timeout_s: float,
        max_bytes: int,
    ) -> AnswerT:
        """Call a route and check its answer.

        Raises:
            NoAnswerError, RefusedError, KeyRefusedError: as they say.
            EngineError: the answer has another form.
        """
        call = f"{method} {self.url}{path}"
        try:
            async with self._session.request(
                method,
                self.url + path,
                json=body,
                params=params,
                headers=self._headers(),
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise self._refusal(call, response, await _read(response, _ERROR_BYTES))
                self._check_kind(call, response)
                content = await _read(response, max_bytes + 1)
        except TimeoutError as error:
            raise NoAnswerError(f"{call}: no answer within {timeout_s:g} s.") from error
        except (aiohttp.ClientError, OSError) as error:
            told = self._shown(str(error))
            # without the cause, which holds the headers
            raise NoAnswerError(f"{call}: {type(error).__name__}: {told}") from None
        if len(content) > max_bytes:
            raise EngineError(f"{call}: the answer is longer than {max_bytes} bytes.")
        try:
            return answer.model_validate_json(content)
        except ValidationError as error:
            raise EngineError(f"{call}: {self._shown(_first_fault(error))}") from None

    def _headers(self) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        return headers

    def _refusal(self, call: str, response: aiohttp.ClientResponse, content: bytes) -> EngineError:
        status = response.status
        if status in (401, 403):
            said = "refuses the API key" if self._api_key else "wants an API key"
            return KeyRefusedError(
                f"{call}: {status}: the server {said}. Pass `api_key=`, or set VLLM_API_KEY."
            )
        if 300 <= status < 400:
            target = self._shown(response.headers.get("Location", "nowhere"))
            return RefusedError(
                f"{call}: {status}: a redirect to {target}, which is not followed. Give the "
                "server's own address.",
                status,
            )
        return RefusedError(
            f"{call}: {status} {self._shown(content.decode('utf-8', 'replace'))}", status
        )

    def _check_kind(self, call: str, response: aiohttp.ClientResponse) -> None:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise EngineError(
                f"{call}: the answer is compressed ({self._shown(encoding)}), unasked."
            )
        if response.content_type != "application/json":
            raise EngineError(
                f"{call}: the answer is {self._shown(response.content_type)}, not JSON."
            )

    def _shown(self, text: str) -> str:
        """Return a stranger's text fit for a message: short, on one line, without our key."""
        if self._api_key:
            text = text.replace(self._api_key, "***")
        return "".join(c if c.isprintable() else " " for c in text[:_SHOWN])


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read at most that much of the body; the rest is dropped with the connection."""
    content = bytearray()
    while len(content) < max_bytes:
        piece = await response.content.read(max_bytes - len(content))
        if not piece:
            break
        content += piece
    return bytes(content)


def _first_fault(error: ValidationError) -> str:
    """Name the first part of an answer that has another form, and what it holds."""
    fault = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, fault["loc"])) or "the answer"
    return f"{where}: {fault['msg']}, got {reprlib.repr(fault['input'])}"
