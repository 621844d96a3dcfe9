"""Texts that a program generates with transformers: the longest that it may, by few passes over the model.

``generate`` does all that it does before and after its passes over the model, and makes its own cache. Of the
passes it makes the first, over the prompts, and the last two, with a cache as long as it gets: it only grows,
so one of these takes most. What is drawn follows from weights that are not there. So all texts have one token
again and again up to their greatest length; all but the first end one token before, so that there is padding,
as where texts differ. (transformers 5.23)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count
from typing import Any, NoReturn

import torch

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.programs.device import is_on_device
from torchtune_adaptive.planner.programs.imports import WhenImported, put
from torchtune_adaptive.planner.programs.known import note, values_of
from torchtune_adaptive.planner.programs.private import goes_on, let_decode
from torchtune_adaptive.planner.programs.steps import ProgramSteps
from torchtune_adaptive.planner.programs.unknown import place_of_caller
from torchtune_adaptive.planner.trace import fake_device
from torchtune_adaptive.planner.trace.recorder import Recorder

_LAST = 2
"""The passes at the end that are made: the first of them differs from those that follow a pass."""


class TextGeneration:
    """Generates for a program; ``tokens`` is the largest number that it has generated for a text."""

    def __init__(self, steps: ProgramSteps, recorder: Recorder) -> None:
        self._steps, self._recorder = steps, recorder
        self.tokens = 0

    def follow(self, imports: WhenImported) -> None:
        """Generate so from now on."""
        imports.call("transformers.generation.utils", lambda it: let_decode(it, self._decoded))
        imports.call("transformers.cache_utils", self._of_caches)
        api = "transformers.generation.continuous_batching.continuous_api"
        imports.call(api, lambda it: put(it.ContinuousMixin, "init_continuous_batching", _refused))

    def _decoded(
        self, decode: Callable[..., Any], model: Any, input_ids: torch.Tensor, **options: Any
    ) -> Any:
        """What ``generate`` does once all is prepared; what is returned is its result."""
        config, begin = options["generation_config"], input_ids.shape[1]
        length = options["stopping_criteria"].max_length
        new = length - begin
        self.tokens = max(self.tokens, new)
        texts = _texts(model.config, config, input_ids, new)

        def run(tokens: torch.Tensor, end: int, **others: Any) -> Any:
            """Decode up to a length, whatever else would end it."""
            only = [one for one in options["stopping_criteria"] if hasattr(one, "max_length")]
            criteria = type(options["stopping_criteria"])(map(copy.copy, only))
            for one in criteria:
                one.max_length = end
            return decode(model, tokens, **{**options, **others, "stopping_criteria": criteria})

        with self._steps.generating():
            if new <= 1 + _LAST:
                result = run(input_ids, length)
            else:
                first = run(input_ids, begin + 1)
                end = length - _LAST
                kept = _kept(first, end - 1 - begin) if config.return_dict_in_generate else {}
                del first
                _lengthen(options.get("past_key_values"), end - 1 - begin)
                tokens = texts[:, :end].to(input_ids.device)
                others = goes_on(model, options, end - begin, end)
                with fake_device.repeated((new - 1) / _LAST):
                    result = run(tokens, length, **others)
                for name, each in kept.items():
                    result[name] = (*each, *result[name])
        found = result.sequences if config.return_dict_in_generate else result
        if is_on_device(found):
            note(found, texts[: len(found)])
        return result

    def _of_caches(self, caches: Any) -> None:
        update = caches.Cache.update

        def updated(*arguments: Any, **options: Any) -> Any:
            before, self._recorder.category = self._recorder.category, Recorder.CACHES
            try:
                return update(*arguments, **options)
            finally:
                self._recorder.category = before

        put(caches.Cache, "update", updated)


def _refused(*_: Any, **__: Any) -> NoReturn:
    raise NoPrediction(
        f"{place_of_caller()}: generates by continuous batching, which is not planned. Use generate, or vLLM."
    )


def _texts(config: Any, how: Any, prompts: torch.Tensor, new: int) -> torch.Tensor:
    """The tokens of prompts, where they are known, and of what follows on them."""
    texts = torch.zeros((len(prompts), prompts.shape[1] + new), dtype=torch.long, device="cpu")
    known = values_of(prompts)
    if known is not None:
        texts[:, : prompts.shape[1]] = known
    pad = how.pad_token_id or 0
    for row, tokens in zip(
        texts, completions(config, how.eos_token_id, len(texts), new), strict=True
    ):
        row[-new:] = torch.tensor([*tokens, *[pad] * (new - len(tokens))])
    return texts


def completions(config: Any, ends: Any, rows: int, new: int) -> list[list[int]]:
    """The tokens of so many texts by a model with this config; ``ends`` are those that end a text."""
    ends = ends if isinstance(ends, (list, tuple)) else [ends] * (ends is not None)
    usual = getattr(config.get_text_config(), "vocab_size", 2) // 2  # others are at the ends
    token = next(one for one in count(usual) if one not in ends)
    longest = [token] * new
    shorter = [*longest[:-2], ends[0]] if ends and new > 1 else longest
    return [longest, *[shorter] * (rows - 1)]


def _kept(result: Any, missing: int) -> dict[str, tuple[Any, ...]]:
    """What a pass has left of the scores of all tokens, and as much for each of the missing passes."""
    found = {}
    for name in ("scores", "logits"):
        for one in result.get(name) or ():
            found[name] = (one, *(torch.empty_like(one) for _ in range(missing)))
    return found


def _lengthen(cache: Any, missing: int) -> None:
    """Let a cache have the keys and values of so many tokens more."""
    cache = getattr(cache, "self_attention_cache", cache)
    for number, layer in enumerate(getattr(cache, "layers", ())):
        if not isinstance(getattr(layer, "keys", None), torch.Tensor):
            continue  # what does not grow
        kept = min(missing, layer.sliding_window) if layer.is_sliding else missing
        more = (_more(one, kept) for one in (layer.keys, layer.values))
        cache.update(*more, number)
        if kept < missing:
            layer.cumulative_length += missing - kept


def _more(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """So many tokens more, which themselves take no memory."""
    return torch.empty_like(states[:, :, :1]).expand(-1, -1, tokens, -1)
