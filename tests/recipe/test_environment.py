"""What a rank's environment is made of: which network, and how long a collective may take."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.core.ranks.signs import LONGEST_SILENCE
from torchtune_adaptive.recipe.settings import checks
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup import environment
from torchtune_adaptive.recipe.setup.environment import start_environment


@pytest.fixture(autouse=True)
def the_logger_as_it_was() -> Iterator[None]:
    """A run owns its process, and with it our logger; other tests listen to that."""
    ours = logging.getLogger("torchtune_adaptive")
    level, handlers, propagates = ours.level, [*ours.handlers], ours.propagate
    yield
    ours.setLevel(level)
    ours.handlers[:], ours.propagate = handlers, propagates


INTERFACES = ["lo", "docker0", "eth0", "eth1", "ib0"]


class TestStart:
    @pytest.fixture(autouse=True)
    def alone(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        for name in ("RANK", "WORLD_SIZE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(INTERFACES, 1)))
        yield
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.pop("GLOO_SOCKET_IFNAME", None)

    def start(self, patience: float = 1200.0, watched: bool = True) -> None:
        cfg = OmegaConf.create({"device": "cpu", "dtype": "fp32"})
        start_environment(Asked.of(cfg, "full"), patience, watched)

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="is about a machine without one")
    @pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps", "nonsense"])
    def test_a_device_that_is_not_there_is_not_replaced_by_the_cpu(self, device: str) -> None:
        cfg = OmegaConf.create({"device": device, "dtype": "fp32"})
        with pytest.raises(
            ConfigError, match=rf"device: '{device}' cannot be used: .*device=cpu"
        ) as raised:
            start_environment(Asked.of(cfg, "full"), 1200.0)
        assert not raised.value.repeats, "the next attempt may find it"
        assert not dist.is_initialized()

    def test_images_need_torchvision(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "find_spec", lambda name: None)
        collate = "torchtune.data.padded_collate_tiled_images_and_mask"
        cfg = OmegaConf.create({"device": "cpu", "dtype": "fp32", "collate_fn": collate})
        with pytest.raises(ConfigError, match=r"needs torchvision .* not installed"):
            start_environment(Asked.of(cfg, "full"), 1200.0)

    def test_the_process_group_waits_longer_than_the_watchdog(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: dict[str, Any] = {}
        init = dist.init_process_group

        def record(*arguments: Any, **settings: Any) -> None:
            asked.update(settings)
            init(*arguments, **settings)

        monkeypatch.setattr(environment.dist, "init_process_group", record)
        for patience in (1.0, 1200.0, 86400.0):
            self.start(patience)
            timeout: timedelta = asked["timeout"]
            assert timeout.total_seconds() > patience
            assert timeout.total_seconds() > LONGEST_SILENCE, "one that saves is waited for as well"
            dist.destroy_process_group()
        self.start(watched=False)
        assert asked["timeout"] is None, "without a watchdog it is torch's own"

    @pytest.mark.parametrize(
        ("nccl", "gloo", "used"),
        [(None, None, None), ("eth1", None, "eth1"), ("eth1", "ib0", "ib0"), ("wlan", None, None)],
    )
    def test_gloo_uses_the_network_of_nccl_unless_it_has_its_own(
        self,
        monkeypatch: pytest.MonkeyPatch,
        nccl: str | None,
        gloo: str | None,
        used: str | None,
    ) -> None:
        for name, value in (("NCCL_SOCKET_IFNAME", nccl), ("GLOO_SOCKET_IFNAME", gloo)):
            if value is not None:
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(environment.dist, "init_process_group", lambda *_, **__: None)
        self.start()
        assert os.environ.get("GLOO_SOCKET_IFNAME") == used
