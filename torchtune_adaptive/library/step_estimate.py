"""An estimate of the peak of a trainer's step, by arithmetic on its settings and the model's config.

It needs no trace, no torch and no transformers. A step is at its peak in one of a few moments: at the head,
in the backward pass of the last or of the first layer, or in the optimizer. What there is in each is written
down here, as traces of transformers' decoders show it. How far estimates are from traces is measured
(``docs/results/trainer_estimate.md``). A ``step`` is a ``TransformersStep``, whose module is above this one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchtune_adaptive.library.step_choices import (
    ALL_LINEAR,
    DPO,
    LINEAR_LAYERS,
    PLAIN,
    SFT,
    TILE_COLUMNS,
    TILE_TOKENS,
)
from torchtune_adaptive.planner import estimate

_HALF, _SINGLE, _NF4 = 2, 4, 0.5
"""Bytes of a number: in 16 bits, in float32, and in NF4 without its scales."""
ERROR = 0.10
"""The share of the traced peak within which nine of ten estimates are
(``docs/results/trainer_estimate.md``)."""
TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""The types of models whose layers are written down."""
_OURS = {"o_proj": "output_proj", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""The projections that have another name in ``Decoder``."""
_MOMENTS_OF_8_BITS = 2 * (1 + 4 / 256)
"""Bytes for each number that is trained: two of one byte, with a scale for each block."""
_STATE: dict[str, float | None] = {
    "adamw_torch_fused": None,
    "adamw_torch": None,
    "adamw_8bit": _MOMENTS_OF_8_BITS,
    "adamw_bnb_8bit": _MOMENTS_OF_8_BITS,
    "paged_adamw_8bit": 0,
    "paged_adamw_32bit": 0,
    "sgd": 0,
}
"""Bytes that optimizers keep on the GPU for each number that is trained; None where these are two of its
type."""
_RESERVED = 1.03
"""What the allocator reserves for each byte that it gives out, in most steps."""


def estimated(step: Any) -> int | None:
    """The peak of a step in bytes, as the allocator reserves them; None if no formula is right for it."""
    try:
        config: dict[str, Any] = json.loads((Path(step.folder) / "config.json").read_text())
        if config["model_type"] not in TYPES or not _is_known(step) or _has_window(config, step):
            return None
        decoder = _decoder(config)
    except (OSError, ValueError, KeyError, TypeError):  # transformers says what is wrong with it
        return None
    rows = step.per_device_train_batch_size * (1 + step.has_pairs)
    norms_heads = config["model_type"] == "qwen3"
    return int(_RESERVED * _Moments(decoder, step, rows * step.max_length, norms_heads).peak())


def _is_known(step: Any) -> bool:
    """Whether all that a step does is in the formulas."""
    return step.trainer in (SFT, DPO, PLAIN) and not (
        step.use_liger_kernel
        or step.load_in_8bit
        or step.target_parameters
        or step.optim not in _STATE
        or (step.fsdp and (step.half is None or step.load_in_4bit))
        or (step.load_in_4bit and step.computes_4_bits_in == "float32")
        # Otherwise another model is its reference.
        or (step.trainer == DPO and not (step.lora or step.precompute_ref_log_probs))
    )


def _has_window(config: dict[str, Any], step: Any) -> bool:
    """Whether a layer sees less than a row by a mask, which is in no formula."""
    has_one = config.get("use_sliding_window", config["model_type"] == "mistral")
    width = config.get("sliding_window", 4096)  # as transformers' configs have it
    return bool(step.has_masks and has_one and width and width <= step.max_length)


def _decoder(config: dict[str, Any]) -> estimate.Decoder:
    """The shape that a model's config gives."""
    heads, embed = config["num_attention_heads"], config["hidden_size"]
    return estimate.Decoder(
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or embed // heads,
        embed=embed,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        longest=config["max_position_embeddings"],
        positions=0,
        tied=bool(config.get("tie_word_embeddings", config["model_type"] == "smollm3")),
    )


class _Moments:
    """The bytes of a step, with so many tokens in a micro-batch, in the moments that may be its peak."""

    def __init__(self, model: estimate.Decoder, step: Any, tokens: int, norms_heads: bool) -> None:
        self._model, self._step, self._tokens, self._norms_heads = model, step, tokens, norms_heads
        self._layer = sum(inputs * outputs for inputs, outputs in model.projections.values())
        self._tables = model.table * (1 if model.tied else 2)
        self._share = step.ranks if step.fsdp else 1
        """How many ranks share a weight."""
        self._trains_all = not step.lora
        self._each = _SINGLE if step.dtype == "float32" else _HALF
        """Bytes of a weight as it is loaded; FSDP gathers it in 16 bits."""
        self._wide = not step.fsdp and (
            step.dtype == "float32" or (step.load_in_4bit and step.is_prepared)
        )
        """Whether what goes from layer to layer is in float32."""
        self._thin = (_SINGLE if self._wide else _HALF) * tokens * model.embed
        """What goes from layer to layer."""
        is_single = step.half is None and self._wide
        self._number = _SINGLE if is_single else _HALF
        """Bytes of a number that linear layers and attention compute."""
        self._casts_inputs = self._wide and not is_single
        """Whether each linear layer makes a copy of its inputs, and of its weights."""
        self._adapters_cast = step.lora and not (step.adapters_are_half or step.fsdp)
        """Whether an adapter computes with a copy of its inputs, and that by way of float32."""

    def peak(self) -> float:
        """The most bytes that are allocated; with FSDP, that are held for each stream."""
        step, kept, layer, gradients = self._step, self._kept, self._in_layer, self._gradients
        before = gradients if step.gradient_accumulation_steps > 1 else 0.0
        of_head = self._of_numbers(self._model.table) if self._trains_all else 0.0
        if step.fsdp:  # what other streams allocate stays theirs: gradients, and what is gathered
            apart = gradients + 2 * _HALF * self._model.table
            return self._always + apart + kept + max(self._head, layer)
        always = self._always + (gradients if step.ranks > 1 else 0.0)  # DDP's buckets
        tied = self._trains_all and self._model.tied
        return always + max(
            before + kept + self._head,
            max(before, of_head) + kept + layer,
            gradients + kept / self._model.layers + layer,
            # The gradient of the embedding, before it is added to that of the head.
            gradients + (of_head if tied else 0.0),
            gradients + (gradients if step.optim == "adamw_torch" else 0.0),
        )

    # --- what is there all the time -------------------------------------------------------------------

    @property
    def _always(self) -> float:
        """Weights and the optimizer's state."""
        model, step = self._model, self._step
        if self._trains_all:
            weights = self._gradients
        else:
            in_layers, others = float(self._each), self._each
            if step.load_in_4bit:
                scales = 1 / 64 if step.bnb_4bit_use_double_quant else _SINGLE / 64
                in_layers = _NF4 + scales
                others = _SINGLE if step.is_prepared else others
            frozen = in_layers * model.layers * self._layer + others * self._tables
            weights = frozen / self._share + self._gradients
        return weights + self._state

    @property
    def _state(self) -> float:
        """The optimizer's state."""
        each = _STATE[self._step.optim]
        if each is None:
            return 2 * self._gradients
        model, bytes_of_gradient = self._model, self._of_numbers(1)
        state = each * self._gradients / bytes_of_gradient
        if each and self._trains_all:  # the embedding's moments are in float32
            state += (2 * _SINGLE - each) * model.table
        return state / self._share

    @property
    def _gradients(self) -> float:
        """The gradients of all that is trained, which has as many bytes itself."""
        if self._trains_all:
            return self._of_numbers(self._model.layers * self._layer + self._tables)
        sizes = map(self._model.projections.__getitem__, self._adapted)
        return self._of_numbers(self._model.layers * self._step.r * sum(map(sum, sizes)))

    def _of_numbers(self, numbers: int) -> float:
        """The bytes of numbers that are trained, on each rank."""
        step = self._step
        if step.lora:
            each = _HALF if step.adapters_are_half else _SINGLE
        else:
            each = _SINGLE if step.fsdp else self._each  # accelerate's master weights
        return each * numbers / self._share

    @property
    def _adapted(self) -> list[str]:
        """The projections with adapters."""
        targets = self._step.target_modules
        if targets in (ALL_LINEAR, LINEAR_LAYERS):
            return [*self._model.projections]
        named = {_OURS.get(name, name) for name in targets}
        return [name for name in self._model.projections if name in named]

    # --- what a micro-batch adds ----------------------------------------------------------------------

    @property
    def _kept(self) -> float:
        """What all layers keep from the forward pass."""
        if self._step.gradient_checkpointing:
            return self._model.layers * self._thin
        return self._model.layers * (self._of_layer + self._casts)

    @property
    def _casts(self) -> float:
        """The weights of a layer as they are multiplied, which mixed precision keeps if they are trained."""
        return _HALF * self._layer if self._casts_inputs and self._trains_all else 0.0

    @property
    def _of_layer(self) -> float:
        """What the backward pass of a layer needs."""
        model, in_heads = self._model, self._model.queries + self._model.keys
        attention: float = 2 * self._number * in_heads  # queries, keys, values, and the output
        if self._step.padded and self._step.has_masks:
            # keys and values for each query, and a mask of such numbers
            attention = self._number * (4 * model.queries + self._step.max_length)
        elif self._scores:  # keys and values for each query, and the scores as shares
            attention = self._number * 4 * model.queries + self._scores
        norms = 2 * _SINGLE * model.embed  # inputs in float32
        if self._trains_all:  # what is scaled, too
            norms += 2 * (_SINGLE if self._wide else _HALF) * model.embed
        if self._norms_heads:
            norms += (_SINGLE + _HALF * self._trains_all) * in_heads
        hidden = 3 * self._number * model.intermediate
        return self._tokens * (attention + norms + hidden + self._of_projections)

    @property
    def _scores(self) -> float:
        """The scores of attention: bytes for each token. Only kernels for 16 bits share keys among queries
        without writing them."""
        model = self._model
        is_written = self._number == _SINGLE and model.kv_heads < model.heads
        return self._number * model.heads * self._step.max_length if is_written else 0.0

    @property
    def _of_projections(self) -> float:
        """What linear layers, or their adapters, have got: bytes for each token."""
        dropout = self._step.lora_dropout > 0
        needed = [*self._model.projections] if self._trains_all else self._adapted
        widths = {name: self._model.projections[name][0] for name in needed}
        masks = sum(widths.values()) if dropout else 0  # of a byte for each number
        if self._casts_inputs or self._adapters_cast or dropout:  # a copy for each
            if self._trains_all:
                widths.pop("output_proj")  # it is in 16 bits, and kept for attention
            return masks + self._number * sum(widths.values())
        shared = ("q_proj", "k_proj", "v_proj"), ("w1", "w3"), ("w2",)
        return self._number * sum(max(widths.get(name, 0) for name in names) for names in shared)

    @property
    def _in_layer(self) -> float:
        """What the backward pass of a layer has besides what all layers have kept."""
        step, one = self._step, self._number * self._model.embed * self._model.intermediate
        again = self._of_layer + self._casts if step.gradient_checkpointing else 0.0
        hidden = self._number * self._tokens * self._model.intermediate
        # Gradients of what is activated, or what an adapter of its product computes with.
        work = ((5 if step.lora_dropout else 3) if self._adapters_cast else 2) * hidden
        stream = 4 * self._thin  # the input, the sum in the layer, what is normed, and the gradient
        of_weights = one if self._trains_all or step.load_in_4bit else 0.0
        if step.fsdp:
            # This layer's and the next one's; and gradients of this one, and what is reduced of the last. If
            # nothing is reduced, nothing frees the head's.
            of_weights = _HALF * (
                4 * self._layer if self._trains_all else 2 * self._layer + self._model.table
            )
        scores = 2 * self._tokens * self._scores
        return again + max(work, scores) + stream + of_weights

    @property
    def _head(self) -> float:
        """What the head and the loss take."""
        model, step, tokens = self._model, self._step, self._tokens
        casts = model.layers * self._casts if step.gradient_checkpointing else 0.0
        gathered = _HALF * (self._layer + model.table) if step.fsdp else 0.0
        if step.trainer == PLAIN:
            logits = tokens * model.vocabulary
            cast = _HALF * model.table if self._casts_inputs else 0.0
            half = _HALF if self._number == _HALF else 0
            forward = (half + 2 * _SINGLE) * logits + casts
            # The block of those in 16 bits is free by then, and too small for any other.
            backward = (half + 3 * _SINGLE) * logits
            return gathered + cast + self._thin + max(forward, backward)
        tile = self._number * min(tokens, TILE_TOKENS) * TILE_COLUMNS
        forward = self._thin + tile + casts
        backward = 2 * self._thin + _SINGLE * tokens * model.embed + tile
        if self._casts_inputs:
            backward += 2 * _HALF * TILE_COLUMNS * model.embed  # pieces of the weight
        if self._trains_all:
            backward += (_SINGLE + (0 if self._wide else _HALF)) * model.table
        return gathered + max(forward, backward)
