"""What forward passes change in modules besides parameters, kept so that it can be set back.

That is buffers, changed in place, as by BatchNorm, or replaced, as by dynamic RoPE; and plain attributes of
modules, such as the longest sequence so far.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.core.device.memory import plain_tensors
from torchtune_adaptive.core.private import version_of

_PLAIN = {bool, int, float, complex, str, tuple, torch.Size, torch.dtype, torch.device, type(None)}
_LOOKS = 2
"""The passes that show what changes. In the first one, flags change that are set once and for all."""


class Buffers:
    """The buffers and plain attributes of models as they were when they were kept last.

    At first all are, and buffers are copied to the host. Once ``learn`` has seen what changes, only those
    modules are looked at that have buffers, or attributes that change; and buffers are copied again, on their
    device, only where one of their module changes in place.
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
        """Set back what has changed since; it may be called again."""
        for each in self._modules:
            each.restore(by_value=self._looks > 0)

    def learn(self) -> None:
        """Learn what changes: what has changed since ``keep``, in a pass that came to its end."""
        if self._looks:
            self._looks -= 1
            watched = [each for each in self._modules if each.has_to_be_watched()]
            if not self._looks:
                self._modules = watched


class _Module:
    """The same of one module, without those inside it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = vars(module)
        self._attributes: dict[str, Any] = {}
        self._buffers: dict[str, torch.Tensor | None] = {}
        self._given: list[torch.Tensor] = []
        """Its buffers, and the attributes that are a number in a tensor."""
        self._tensors: list[torch.Tensor] = []
        """The plain tensors that they are made of."""
        self._versions: list[int] = []
        self._copies: list[torch.Tensor] = []
        self._on_host = False
        """Whether the copies are."""
        self._changes = False
        """Whether one of them changes in place. Then all count as changed: BatchNorm's kernels count no
        version of the running statistics that they write, and one of the number of batches (torch 2.13)."""

    def keep(self, everything: bool) -> None:
        self._attributes, self._buffers = self._plain_attributes(), {**self._module["_buffers"]}
        given = [each for each in self._buffers.values() if each is not None]
        given += [each for each in self._attributes.values() if type(each) is torch.Tensor]
        replaced = not _are(given, self._given)
        if replaced:
            # An inference tensor counts no versions, and no step can change it in place.
            counted = [each for each in given if not each.is_inference()]
            self._given = given
            self._tensors = [plain.detach() for each in counted for plain in plain_tensors(each)]
        else:
            self._changes = self._changes or self._have_changed(by_value=False)
        if not (replaced or self._changes or everything):
            return
        if replaced or (self._on_host and not everything):
            place = {"device": "cpu"} if everything else {}
            self._copies = [torch.empty_like(each, **place) for each in self._tensors]
            self._on_host = everything
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            copy.copy_(tensor)
        self._versions = [*map(version_of, self._tensors)]

    def restore(self, by_value: bool) -> None:
        for name in self._plain_attributes().keys() - self._attributes.keys():
            del self._module[name]
        self._module.update(self._attributes)
        buffers = self._module["_buffers"]
        buffers.clear()
        buffers.update(self._buffers)
        self._changes = self._changes or self._have_changed(by_value)
        if self._changes:
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(copy)
            self._versions = [*map(version_of, self._tensors)]

    def has_to_be_watched(self) -> bool:
        """Whether it has buffers, or attributes that have changed since they were kept."""
        self._changes = self._changes or self._have_changed(by_value=True)
        now, before = self._plain_attributes(), self._attributes
        replaced = now.keys() != before.keys() or not _are(now.values(), before.values())
        return replaced or any(each is not None for each in self._buffers.values())

    def _plain_attributes(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self._module.items()
            # Not of a tensor with a graph, which it would keep alive.
            if type(value) in _PLAIN
            or (type(value) is torch.Tensor and value.numel() == 1 and not value.requires_grad)
        }

    def _have_changed(self, by_value: bool) -> bool:
        if self._versions != [*map(version_of, self._tensors)]:
            return True
        pairs = zip(self._tensors, self._copies, strict=True)
        return by_value and not all(torch.equal(one.to(two.device), two) for one, two in pairs)


def _are(these: Any, those: Any) -> bool:
    """Whether they are the same objects, one by one."""
    return len(these) == len(those) and all(map(is_, these, those))
