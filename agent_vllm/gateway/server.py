"""Speak the OpenAI API over HTTP, for the sessions of one rollout.

Owns routes, keys and the form of answers; `session.py` makes them. Invariant: a request without the
key of a session that goes on gets 401 and touches nothing.
"""

import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiohttp import web

from agent_vllm.gateway.fields import Refused, read_request
from agent_vllm.gateway.session import Answer, Session

MODEL = "policy"  # the name under which agents ask for the model
_LOOPBACK = "127.0.0.1"
_MAX_BODY_BYTES = 4 * 1024**2


class Gateway:
    """Serve sessions, each by its key, to this machine only. Open it with `async with`.

    Attributes:
        base_url: for clients, with `/v1`; once it is open.
    """

    def __init__(self) -> None:
        self.base_url = ""
        self._sessions: dict[str, Session] = {}
        app = web.Application(middlewares=[_errors], client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get(f"/v1/models/{MODEL}", self._show_model)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def __aenter__(self) -> "Gateway":
        await self._runner.setup()
        await web.TCPSite(self._runner, _LOOPBACK, 0, backlog=1024).start()
        self.base_url = f"http://{_LOOPBACK}:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @contextlib.asynccontextmanager
    async def serve(self, session: Session) -> AsyncIterator[str]:
        """Serve a session while the block runs; yield its key."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            await session.close()

    # ---- routes ----

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        session = self._session(http)
        sampling = session.sampler.context.sampling
        request = read_request(await http.read(), MODEL, sampling)
        answer = await session.answer(request)
        if not request.stream:
            return web.json_response(_completion(answer))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for chunk in _chunks(answer, with_usage=request.wants_usage):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _list_models(self, http: web.Request) -> web.Response:
        self._session(http)
        return web.json_response({"object": "list", "data": [_MODEL_CARD]})

    async def _show_model(self, http: web.Request) -> web.Response:
        self._session(http)
        return web.json_response(_MODEL_CARD)

    def _session(self, http: web.Request) -> Session:
        scheme, _, key = http.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip())
        if scheme.lower() != "bearer" or session is None:
            raise Refused(
                "The API key belongs to no trajectory that goes on.",
                status=401,
                code="invalid_api_key",
            )
        return session


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Give every error the form that clients expect."""
    try:
        return await handler(request)
    except Refused as refused:
        return web.json_response(refused.body, status=refused.status)
    except web.HTTPException as error:  # an unknown route, or a body that is too long
        refused = Refused(f"{error.reason}: {request.method} {request.path}", status=error.status)
        return web.json_response(refused.body, status=refused.status)


_MODEL_CARD = {"id": MODEL, "object": "model", "created": 0, "owned_by": "agent-vllm"}


def _head(kind: str) -> dict[str, Any]:
    name = f"chatcmpl-{secrets.token_hex(8)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": MODEL}


def _usage(answer: Answer) -> dict[str, int]:
    num_prompt, num_sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def _completion(answer: Answer) -> dict[str, Any]:
    choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason}
    return {**_head("chat.completion"), "choices": [choice], "usage": _usage(answer)}


def _chunks(answer: Answer, *, with_usage: bool) -> Iterator[dict[str, Any]]:
    """Yield the answer in pieces: its message, then why it ended, then its usage."""
    head = _head("chat.completion.chunk")
    delta = {**answer.message, "content": answer.message["content"] or ""}
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}]}
    if with_usage:
        yield {**head, "choices": [], "usage": _usage(answer)}
