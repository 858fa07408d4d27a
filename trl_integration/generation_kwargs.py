"""`generation_kwargs` of TRL's config, key by key, in the words of vLLM and of transformers.

Owns which setting a key sets. Invariant: a key is obeyed or refused with the way that exists.
"""

from collections.abc import Mapping
from typing import Any

_SETTINGS = {
    "stop": "stop_strings",
    "max_tokens": "max_new_tokens",
    **{
        name: name
        for name in (
            "stop_strings", "max_new_tokens", "temperature", "top_p", "top_k", "min_p",
            "repetition_penalty",
        )
    },
}  # fmt: skip

# Values that change nothing.
_NEUTRAL = {
    "do_sample": True,
    "frequency_penalty": 0.0,
    "min_new_tokens": 0,
    "min_tokens": 0,
    "n": 1,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "presence_penalty": 0.0,
    "use_cache": True,
}

_END_TOKENS = (
    "Pass `chat_format=ChatFormat.from_tokenizer(tokenizer, eos_token_ids=[...])` to the trainer."
)
_WAYS = {
    "do_sample": "The samples of a group must differ. Set `temperature`.",
    "eos_token_id": _END_TOKENS,
    "max_length": "Set `max_completion_length`, or `max_new_tokens` for each turn.",
    "n": "Set `num_generations`.",
    "num_return_sequences": "Set `num_generations`.",
    "seed": "Set the config's `seed`, which the seeds of all rollouts come from.",
    "stop_token_ids": _END_TOKENS,
}
_NO_WAY = (
    "The learner could not reproduce the distribution that is sampled from, or no rollout engine "
    "knows it. Leave it out."
)


def settings_of(generation_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the settings of the config that the keys set.

    Raises:
        ValueError: a key can't be obeyed.
    """
    settings = {}
    for key, value in generation_kwargs.items():
        if key in _SETTINGS:
            is_string = key in ("stop", "stop_strings") and isinstance(value, str)
            settings[_SETTINGS[key]] = [value] if is_string else value
        elif key not in _NEUTRAL or value not in (None, _NEUTRAL[key]):
            raise ValueError(
                f"`generation_kwargs` must not have the key {key!r}, got {value!r}. "
                f"{_WAYS.get(key, _NO_WAY)}"
            )
    return settings
