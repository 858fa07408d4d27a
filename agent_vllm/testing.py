"""Test tools, environments and rewards without a model: an engine that follows a script.

Never used in training. Invariant: the script's tokens are what is sampled, cut at the request's
`max_new_tokens` as a real engine cuts them.
"""

from collections.abc import Callable, Iterable, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_vllm.engines.base import RolloutEngine
from agent_vllm.engines.models import merge_end_token_ids
from agent_vllm.engines.request import GenerationRequest, ends_on_string
from agent_vllm.types import Completion

Script = Callable[[GenerationRequest], Sequence[int] | Exception]


class ScriptedRolloutEngine(RolloutEngine):
    """Answer from a script; every sampled token has logprob -0.5.

    These logprobs are far from any learner's: a trainer trains on them only with
    `max_logprob_gap=math.inf`.

    Args:
        tokenizer: encodes turns given as text; its end token is added to them.
        turns: the turns of a conversation in order, as text or ids (each request takes the next
            one; the last is repeated). Or a function from a request to the ids of its turn, or to
            an error that the engine raises.
        max_model_len: prompt and completion together.

    Attributes:
        requests: every request, in order.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        turns: Sequence[str | Sequence[int]] | Script,
        *,
        max_model_len: int = 4096,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        super().__init__(
            tokenizer=tokenizer,
            vocab_size=len(tokenizer),
            max_model_len=max_model_len,
            eos_token_ids=merge_end_token_ids(tokenizer.eos_token_id, list(eos_token_ids)),
        )
        self.requests: list[GenerationRequest] = []
        self._script = turns if callable(turns) else self._in_order(turns)

    async def _sample(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        turn = self._script(request)
        if isinstance(turn, Exception):
            raise turn
        token_ids = list(turn)[: request.max_new_tokens]
        ended = bool(token_ids) and (
            token_ids[-1] in request.stop_token_ids
            or ends_on_string(self.tokenizer, token_ids, request.sampling.stop_strings)
        )
        return Completion(
            token_ids=token_ids,
            logprobs=[-0.5] * len(token_ids),
            finish_reason="stop" if ended else "length",
            policy_version=self.policy_version,
        )

    def _load_weights(self, model: PreTrainedModel) -> None:
        """Do nothing: a script has no weights. Only the version counts up."""

    def _in_order(self, turns: Sequence[str | Sequence[int]]) -> Script:
        def script(_: GenerationRequest) -> Sequence[int]:
            turn = turns[min(len(self.requests), len(turns)) - 1]
            return self.encode_turn(turn) if isinstance(turn, str) else turn

        return script

    def encode_turn(self, text: str) -> list[int]:
        """Return the ids of a turn's text, with the end token."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, self.eos_token_ids[0]]
