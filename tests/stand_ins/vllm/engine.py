"""The engine: a model that samples, sleeps, and takes the weights it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True)
class Call:
    """A call of the engine."""

    name: str
    of: Any = None
    """The tags that wake up, the number of weights or of prompts."""


calls: list[Call] = []
"""What has been called, in turn. Weights that are loaded one after another are one call."""


@dataclass
class SamplingParams:
    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    logprobs: int | None = None


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int = 1


@dataclass(frozen=True)
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]


@dataclass(frozen=True)
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)


class LLM:
    """An engine in the process of the trainer."""

    def __init__(
        self, model: str, *, enable_sleep_mode: bool = False, seed: int = 0, **settings: Any
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.settings = settings
        self._model = AutoModelForCausalLM.from_pretrained(model).eval()
        self._weights = dict(self._model.named_parameters(remove_duplicate=False))
        self._seed, self._generations = seed, 0
        self._sleeps_at_times = enable_sleep_mode
        self._asleep: set[str] = set()
        self._discarded: set[str] = set()
        length = self._model.config.max_position_embeddings
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=length),
            model_executor=SimpleNamespace(
                driver_worker=SimpleNamespace(
                    model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=self.load))
                )
            ),
        )
        calls.append(Call("LLM"))

    # --- weights -----------------------------------------------------------------------------------

    def load(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        assert "weights" not in self._asleep, "weights would be written to memory that is unmapped"
        for name, value in weights:
            with torch.no_grad():
                self._weights[name].copy_(value)
            self._discarded.discard(name)
        before = calls.pop() if calls[-1].name == "load_weights" else Call("load_weights", 0)
        calls.append(Call("load_weights", before.of + len(weights)))

    def reset_prefix_cache(self) -> None:
        calls.append(Call("reset_prefix_cache"))

    def sleep(self, level: int = 1) -> None:
        assert self._sleeps_at_times and level == 2
        self._asleep = {"weights", "kv_cache"}
        self._discarded = {*dict(self._model.named_parameters())}
        calls.append(Call("sleep"))

    def wake_up(self, tags: list[str]) -> None:
        assert self._sleeps_at_times
        self._asleep -= {*tags}
        calls.append(Call("wake_up", tuple(tags)))

    # --- generation --------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[dict[str, list[int]]],
        sampling_params: SamplingParams,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        assert not self._asleep, f"asleep: {self._asleep}"
        assert not self._discarded, f"weights that nobody has given back: {self._discarded}"
        calls.append(Call("generate", len(prompts)))
        self._generations += 1
        drawn = torch.Generator().manual_seed(1000 * self._seed + self._generations)
        return [
            RequestOutput(
                each["prompt_token_ids"],
                [
                    self._completion(each["prompt_token_ids"], sampling_params, drawn)
                    for _ in range(sampling_params.n)
                ],
            )
            for each in prompts
        ]

    @torch.no_grad()
    def _completion(
        self, prompt: list[int], sampling: SamplingParams, drawn: torch.Generator
    ) -> CompletionOutput:
        made: list[int] = []
        logprobs: list[dict[int, Logprob]] = []
        ending = self._model.config.eos_token_id
        while len(made) < sampling.max_tokens and ending not in made:
            ids = torch.tensor([prompt + made])
            logits = self._model(input_ids=ids).logits[0, -1].float() / sampling.temperature
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=drawn))
            made.append(token)
            logprobs.append({token: Logprob(float(logits.log_softmax(-1)[token]))})
        return CompletionOutput(made, logprobs)
