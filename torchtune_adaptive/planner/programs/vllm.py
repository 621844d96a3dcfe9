"""vLLM for TRL (1.16): what its engine holds on the GPUs of a training, or a server of it on others.

It takes a share of the card, by its own setting, for its weights and its cache, and nothing of torch's. An
engine that sleeps gives that back, but for CUDA graphs and the buffers of libraries. Texts are the longest
that are asked for. (vLLM 0.31, of which nothing runs here.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import cycle, islice
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.memory.allocator import BESIDE
from torchtune_adaptive.planner.memory.gpus import Gpu
from torchtune_adaptive.planner.programs.generation import completions
from torchtune_adaptive.planner.programs.imports import WhenImported
from torchtune_adaptive.planner.programs.private import let_serve
from torchtune_adaptive.planner.programs.stand_ins import StandIn
from torchtune_adaptive.planner.programs.steps import ProgramSteps
from torchtune_adaptive.planner.trace import fake_device
from torchtune_adaptive.planner.trace.recorder import Recorder

ASLEEP = 1 << 30
"""Assumption: what an engine keeps that sleeps. Reports of vLLM say 0.3 GiB (19.51 of 19.78 GiB freed,
https://github.com/vllm-project/vllm/issues/17117), and more with tensor parallelism
(https://github.com/NVIDIA-NeMo/RL/issues/223)."""
_PACKED, _BUFFERS = 1 << 30, 2
"""Bytes of weights from which on they are sent to a server, and the buffers for that."""
_ADDRESS, _JOINS, _SENDS = "get_ip", "trainer_init", "packed_nccl_broadcast_producer"
_NAMES = {
    "": ("LLM", "SamplingParams", "RequestOutput"),
    ".sampling_params": ("SamplingParams", "StructuredOutputsParams"),
    ".utils.network_utils": (_ADDRESS,),
    ".distributed.weight_transfer.nccl_common": (_JOINS,),
    ".distributed.weight_transfer.packed_tensor": (_SENDS,),
    ".distributed.device_communicators.pynccl": ("PyNcclCommunicator",),
    ".distributed.utils": ("StatelessProcessGroup",),
}
_PACKAGES = (
    *(".utils", ".distributed", ".distributed.weight_transfer"),
    ".distributed.device_communicators",
)


class Vllm:
    """vLLM as TRL finds it; ``config`` gives that of the program's model."""

    def __init__(
        self, gpu: Gpu, steps: ProgramSteps, recorder: Recorder, config: Callable[[], Any]
    ) -> None:
        self.gpu, self.steps, self.recorder, self.config = gpu, steps, recorder, config
        self.card = ""
        """The name of the GPU, once an engine has a share of it."""

    def follow(self, imports: WhenImported) -> None:
        """Let it be found from now on."""
        stand_in = StandIn("vllm", "0.31.0", "vllm", self._module)
        imports.call("trl.import_utils", lambda _: sys.meta_path.insert(0, stand_in))
        imports.call("trl.generation.vllm_client", lambda it: let_serve(it, _got, self._posted))

    def _module(self, name: str) -> ModuleType | None:
        part = name.removeprefix("vllm")
        if part not in (*_NAMES, *_PACKAGES):
            return None
        made = ModuleType(name)
        known: dict[str, Any] = {"LLM": partial(_Engine, self, self.gpu.total), _SENDS: _sent}
        known |= {_ADDRESS: lambda: "127.0.0.1", _JOINS: lambda _: SimpleNamespace(group=None)}
        vars(made).update({one: known.get(one, _Sampling) for one in _NAMES.get(part, ())})
        return made

    def _posted(self, url: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a server on other GPUs answers.

        Raises:
            NoPrediction: it is asked for texts in another way than by prompts.
        """
        if "prompt" not in asked:
            if "messages" in asked or "token_ids" in asked:
                raise NoPrediction(
                    f"{url}: prompts with images are not planned with a server. Use vllm_mode=colocate."
                )
            return {}
        known = {name: asked[name] for name in ("n", "max_tokens", "logprobs") if name in asked}
        sampling = _Sampling(**known)
        prompts = [one for one in asked["prompt"] for _ in range(sampling.n)]
        texts = self.generated(len(prompts), sampling)
        return {
            "choices": [
                {"prompt_token_ids": prompt, "token_ids": text, "logprobs": sampling.named(text)}
                for prompt, text in zip(prompts, texts, strict=True)
            ]
        }

    def generated(self, rows: int, sampling: _Sampling) -> list[list[int]]:
        """The tokens of so many texts."""
        with self.steps.generating():
            config = self.config()
            return completions(config, config.eos_token_id, rows, sampling.max_tokens)


class _Sampling(SimpleNamespace):
    """What is asked for."""

    n, max_tokens, logprobs = 1, 16, None

    def shares(self, tokens: Sequence[int]) -> list[dict[int, Any]] | None:
        """Log-probabilities of these tokens, and of as many others as are asked for."""
        if self.logprobs is None:
            return None
        places = range(self.logprobs + 1)
        return [
            {one + at: SimpleNamespace(logprob=-1.0, rank=at + 1) for at in places}
            for one in tokens
        ]

    def named(self, tokens: Sequence[int]) -> Mapping[str, Any] | None:
        """The same as a server says it."""
        shares = self.shares(tokens)
        if shares is None:
            return None
        return {
            "tokens": [f"token_id:{one}" for one in tokens],
            "token_logprobs": [-1.0] * len(tokens),
            "top_logprobs": [{f"token_id:{one}": -1.0 for one in each} for each in shares],
        }


class _Engine:
    """An engine on the GPU of the program."""

    def __init__(
        self,
        vllm: Vllm,
        total: int,
        model: str,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        **_: Any,
    ) -> None:
        vllm.card = vllm.gpu.name
        self._vllm, self._name, self._share = vllm, model, int(total * gpu_memory_utilization)
        self._stream = fake_device.FakeStream()
        self._stream.number = BESIDE
        self._awake: AbstractContextManager[None] | None = None
        length = max_model_len or getattr(vllm.config(), "max_position_embeddings", sys.maxsize)
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda _: None))
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        about = SimpleNamespace(max_model_len=length)
        self.llm_engine = SimpleNamespace(model_executor=worker, model_config=about)
        self._hold(min(ASLEEP, self._share))
        self._given_back = self._hold(max(0, self._share - ASLEEP))

    def _hold(self, nbytes: int) -> tuple[int, int]:
        """The block of so many bytes, and these."""
        with self._stream:
            return self._vllm.recorder.allocate(nbytes, "vLLM", "vLLM"), nbytes

    def sleep(self, level: int = 1) -> None:
        self._vllm.recorder.free(*self._given_back)
        if self._awake is not None:
            self._awake.__exit__(None, None, None)
            self._awake = None

    def wake_up(self, tags: Any = None) -> None:
        if self._awake is None:
            self._awake = self._vllm.steps.generating()
            self._awake.__enter__()
            self._given_back = self._hold(self._given_back[1])

    def reset_prefix_cache(self) -> None: ...

    def generate(
        self, prompts: Sequence[Any], sampling_params: _Sampling, **_: Any
    ) -> list[SimpleNamespace]:
        texts = iter(self._vllm.generated(len(prompts) * sampling_params.n, sampling_params))
        found = []
        for prompt in prompts:
            mine = islice(texts, sampling_params.n)
            outputs = [
                SimpleNamespace(token_ids=one, logprobs=sampling_params.shares(one)) for one in mine
            ]
            found.append(SimpleNamespace(prompt_token_ids=self._tokens(prompt), outputs=outputs))
        return found

    def _tokens(self, prompt: Any) -> list[int]:
        given = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        if "prompt_token_ids" in given:
            return list(given["prompt_token_ids"])
        from transformers import AutoTokenizer

        return list(AutoTokenizer.from_pretrained(self._name)(given["prompt"]).input_ids)


def _sent(iterator: Iterable[Any], group: Any, src: int, post_iter_func: Any) -> None:
    """Send weights to a server: many together, in one of several buffers, each by a stream of its own."""
    streams = [fake_device.FakeStream() for _ in range(_BUFFERS)]
    sent: list[torch.Tensor | None] = [None] * _BUFFERS
    left = iter(iterator)
    for at in cycle(range(_BUFFERS)):
        sent[at] = None
        together: list[torch.Tensor] = []
        with streams[at]:
            for item in left:
                together.append(post_iter_func(item).contiguous().view(torch.uint8).flatten())
                if sum(part.numel() for part in together) > _PACKED:
                    break
            if not together:
                return
            sent[at] = torch.cat(together)


def _got(url: str) -> Mapping[str, Any]:
    """What a server says about itself."""
    if url.endswith("/models"):
        return {"data": [{"id": "model"}]}
    about = {"model_config": {"logprobs_mode": "processed_logprobs"}, "weight_transfer_config": {}}
    return {"world_size": 1, "vllm_config": about}
