"""What forward passes change in modules besides parameters, kept so that it can be set back.

That is buffers, changed in place, as by BatchNorm, or replaced, as by dynamic RoPE; and plain attributes of
modules, such as the longest sequence so far.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchtune_adaptive.core.device.memory import plain_tensors
from torchtune_adaptive.core.private import version_of

_PLAIN = {bool, int, float, complex, str, tuple, torch.Size, torch.dtype, torch.device, type(None)}
_SWITCHED = {"gradient_checkpointing", "num_output_chunks"}
"""Attributes of transformers' layers and torchtune's models that memory knobs set, and no forward pass."""
_OF_WEIGHTS = 16 << 20
"""The bytes from which a tensor of whole numbers is taken for quantized weights, which no pass changes."""
_LOOKS = 2
"""The passes that show what changes. In the first one, flags change that are set once and for all."""


class Buffers:
    """The buffers and plain attributes of models as they were when they were kept last.

    At first all are, and buffers are copied to the host. Once ``learn`` has seen what changes, only modules
    that have buffers, or attributes that change, are looked at; and buffers are copied, on their device, only
    where one of their module changes in place.
    """

    def __init__(self, *models: nn.Module) -> None:
        modules = {module: None for model in models for module in model.modules()}
        self._modules = [_Module(module) for module in modules]
        self._looks = _LOOKS
        self.keep()

    def keep(self) -> None:
        """Keep what is there now."""
        for each in self._modules:
            each.keep(everything=self._looks > 0)

    def restore(self) -> None:
        """Set back what has changed since, except for what is set up once; it may be called again."""
        for each in self._modules:
            each.restore(by_value=self._looks > 0)

    def learn(self) -> None:
        """Learn what changes: what has changed since ``keep``, in a pass that came to its end."""
        if self._looks:
            self._looks -= 1
            watched = [each for each in self._modules if each.has_to_be_watched()]
            if not self._looks:
                self._modules = watched
                for each in watched:
                    each.drop_copies()


class _Module:
    """The same of one module, without those inside it."""

    def __init__(self, module: nn.Module) -> None:
        self._places: tuple[dict[str, Any], ...] = vars(module), vars(module)["_buffers"]
        self._kept: list[dict[str, Any]] = []
        """What was in these."""
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._copies: list[torch.Tensor] = []
        self._changes = False
        """Whether a tensor changes in place. Then all count as changed: BatchNorm's kernels count no version
        of the running statistics that they write, and one of the number of batches (torch 2.13)."""

    def keep(self, everything: bool) -> None:
        self._kept = self._found()
        tensors = [
            plain
            for each in [value for kept in self._kept for value in kept.values()]
            # No step can change an inference tensor in place.
            if type(each) not in _PLAIN and not each.is_inference()
            for plain in plain_tensors(each)
            if plain.is_floating_point() or plain.nbytes < _OF_WEIGHTS
        ]
        replaced = [*map(id, tensors)] != [*map(id, self._tensors)]
        self._changes = self._changes or (not replaced and self._have_changed(by_value=False))
        if replaced or self._changes or everything:
            self._tensors, self._versions = tensors, [*map(version_of, tensors)]
            self._copies = [
                each.detach().to("cpu" if everything else each.device, copy=True)
                for each in tensors
            ]

    @torch.no_grad()
    def restore(self, by_value: bool) -> None:
        found = self._found()
        added = [now.keys() - kept.keys() for now, kept in zip(found, self._kept, strict=True)]
        # A flag that a pass adds says that something is set up, such as hooks, which is not undone.
        if any(found[0][name] is True for name in added[0]):
            added = [set(), set()]
        for place, kept, names in zip(self._places, self._kept, added, strict=True):
            for name in names:
                del place[name]
            place.update(kept)
        self._changes = self._changes or self._have_changed(by_value)
        if self._changes and self._copies:
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(copy)
            self._versions = [*map(version_of, self._tensors)]

    def drop_copies(self) -> None:
        """Drop copies on the host of what does not change in place."""
        if not self._changes:
            self._copies = []

    def has_to_be_watched(self) -> bool:
        """Whether it has buffers, or attributes that have changed since they were kept."""
        self._changes = self._changes or self._have_changed(by_value=True)
        before, now = (
            [{n: id(v) for n, v in one.items()} for one in each]
            for each in (self._kept, self._found())
        )
        return before != now or any(each is not None for each in self._kept[1].values())

    def _found(self) -> list[dict[str, Any]]:
        """What there is now: plain attributes, numbers in tensors too, and buffers."""
        attributes, buffers = self._places
        plain = {
            name: value
            for name, value in attributes.items()
            # Not of a tensor with a graph, which it would keep alive.
            if (type(value) in _PLAIN and name not in _SWITCHED)
            or (type(value) is torch.Tensor and value.numel() == 1 and not value.requires_grad)
        }
        return [plain, {**buffers}]

    def _have_changed(self, by_value: bool) -> bool:
        pairs = zip(self._tensors, self._copies, strict=True)
        return self._versions != [*map(version_of, self._tensors)] or (
            by_value and not all(torch.equal(one.to(two.device), two) for one, two in pairs)
        )
