"""A stand-in for `vllm.LLMEngine` that fails where the real one would use lost or stale memory."""

import types

from transformers import Qwen3Config


class StandIn:
    """Notes the order of calls; weights or cache that sleep may not be used."""

    def __init__(self):
        self.calls = []
        self.asleep = set()
        self.weights = {}
        self.are_lost = False
        self.stale = set()
        self.request = None
        model = types.SimpleNamespace(named_parameters=lambda: [], load_weights=self._load)
        runner = types.SimpleNamespace(get_model=lambda: model)
        worker = types.SimpleNamespace(model_runner=runner)
        self.model_executor = types.SimpleNamespace(driver_worker=worker, shutdown=lambda: None)
        self.output_processor = types.SimpleNamespace(tokenizer=None)
        scheduler = types.SimpleNamespace(get_request_counts=lambda: (0, 0), shutdown=lambda: None)
        core = types.SimpleNamespace(scheduler=scheduler, model_executor=self.model_executor)
        finalizer = types.SimpleNamespace(detach=lambda: None)
        self.model_config = types.SimpleNamespace(hf_config=Qwen3Config())
        self.engine_core = types.SimpleNamespace(engine_core=core, _finalizer=finalizer)
        self._model = model

    def _load(self, weights):
        self.weights = {name: tensor.clone() for name, tensor in weights}
        return set(self.weights)

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}
        self.are_lost = level == 2

    def wake_up(self, tags=("weights", "kv_cache")):
        self.calls += [f"wake {tag}" for tag in tags]
        self.asleep -= set(tags)

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        if "weights" in self.asleep:
            raise RuntimeError("weights were written while they are asleep")
        self.calls.append("load")
        self._model.load_weights(kwargs["weights_iterator"])
        self.are_lost, self.stale = False, {"mm", "encoder", "prefix"}

    def reset_mm_cache(self):
        self._reset("mm")

    def reset_encoder_cache(self):
        self._reset("encoder")

    def reset_prefix_cache(self):
        self._reset("prefix")
        return True

    def _reset(self, cache):
        self.calls.append(f"reset_{cache}_cache")
        self.stale.discard(cache)

    def add_request(self, request_id, prompt, params, lora_request=None):
        self.request = (request_id, prompt["prompt_token_ids"])
        return request_id

    def abort_request(self, ids, internal):
        self.request = None

    def step(self):
        if self.asleep:
            raise RuntimeError(f"{sorted(self.asleep)} were used while asleep")
        if self.are_lost:
            raise RuntimeError("weights were lost in sleep and are used")
        if self.stale:
            raise RuntimeError(f"caches of old weights are used: {sorted(self.stale)}")
        self.calls.append("generate")
        request_id, prompt_ids = self.request
        sample = types.SimpleNamespace(
            token_ids=[7],
            logprobs=types.SimpleNamespace(logprobs=[-0.5]),
            finish_reason="length",
        )
        return [
            types.SimpleNamespace(
                request_id=request_id, prompt_token_ids=prompt_ids, outputs=[sample],
                finished=True, num_cached_tokens=0,
            )
        ]  # fmt: skip
