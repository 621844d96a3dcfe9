"""Stops a run whose config cannot work, before any model is built.

``torchtune_keys`` knows what each of torchtune's keys may be, ``adaptive`` what each of ours may be, and
``conflicts`` what cannot be combined.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_adaptive.common import ConfigError, launcher, printable
from torchtune_adaptive.recipe.settings.adaptive import BLOCK, AdaptiveSettings
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.conflicts import conflicts
from torchtune_adaptive.recipe.settings.kind_table import (
    Kind,
    about_unused,
    has_images,
    require_own,
    unused_keys,
)
from torchtune_adaptive.recipe.settings.knob_table import KNOBS_BY_KEY
from torchtune_adaptive.recipe.settings.mistakes import FIRST, Each
from torchtune_adaptive.recipe.settings.torchtune_keys import check_values

log = logging.getLogger(__name__)


def check(cfg: DictConfig, kind: Kind) -> Asked:
    """What a config asks for; ``ConfigError`` if something is wrong in it that can be seen before a model is
    built."""
    asked = read(cfg, kind)
    check_together(asked)
    return asked


def read(cfg: DictConfig, kind: Kind, each: Each = FIRST) -> Asked:
    """What a config asks for, each of its keys and values checked within ``each``. What cannot be read at all
    ends it in any case."""
    with _readable(cfg):
        with each:
            require_own(cfg, kind)
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        assert isinstance(values, dict)
        unused_keys(cfg, kind, each)  # raises where one is misspelled
        asked = Asked.of(cfg, kind.name, each)
        check_values({str(key): value for key, value in values.items()}, kind, each)
    return asked


def check_together(asked: Asked, each: Each = FIRST) -> None:
    """Raise ``ConfigError``, within ``each``, for what is right by itself and cannot be combined."""
    with _readable(asked.cfg):
        for there_is, key, reason, remedy in conflicts(asked):
            with each:
                if there_is:
                    raise ConfigError(key, _value(asked, key), reason, remedy)
        with each:
            _require_knobs(asked.settings)
        with each:
            if asked.settings.budgets and asked.images:
                raise token_budget_with_images(asked.settings)


@contextmanager
def _readable(cfg: DictConfig) -> Iterator[None]:
    """A context in which what OmegaConf raises becomes a ``ConfigError``."""
    try:
        yield
    except OmegaConfBaseException as error:  # a reference to a key that does not exist, for one
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        key, value = _unreadable(cfg, error)
        if "torchvision" in reason:
            raise missing_torchvision(key, value, error) from error
        raise ConfigError(
            key, value, f"cannot be read: {reason}", "Correct it in the config"
        ) from error


def warn_of_unused_keys(cfg: DictConfig, kind: Kind) -> None:
    """Say, once, which keys of a config change nothing."""
    if launcher.rank() == 0:
        for key in unused_keys(cfg, kind):
            log.warning(printable(about_unused(key, kind)))


def _unreadable(cfg: DictConfig, error: OmegaConfBaseException) -> tuple[str, object]:
    """The key whose value cannot be read, and the value as it is written."""
    value: Any = OmegaConf.to_container(cfg)
    if not error.full_key:  # as for a whole block that refers to nothing
        try:
            OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as found:
            error = found
    for name in re.findall(r"[^.\[\]]+", error.full_key or ""):
        value = value[int(name)] if isinstance(value, list) else value.get(name)
    return error.full_key or "config", value if error.full_key else None


def _value(asked: Asked, key: str) -> object:
    """What a key of ours, or of torchtune, is set to; of a list of datasets, in one of them."""
    if key in KNOBS_BY_KEY:
        return KNOBS_BY_KEY[key].configured(asked)
    block, _, inner = key.rpartition(".")
    datasets = asked.cfg.get(block)
    if isinstance(datasets, ListConfig):
        return next((one[inner] for one in datasets if one.get(inner)), None)
    name = key.removeprefix(f"{BLOCK}.")
    settings = asked.settings
    return getattr(settings, name) if hasattr(settings, name) else OmegaConf.select(asked.cfg, key)


def _require_knobs(settings: AdaptiveSettings) -> None:
    """What may change must be knobs; on a model that is already built, switches."""
    keys = settings.may_change if isinstance(settings.may_change, tuple) else ()
    for key in keys:
        if key not in KNOBS_BY_KEY:
            reason = "is not a knob that trades memory for speed"
            remedy = f"Use exact, rounding, or a list of {', '.join(KNOBS_BY_KEY)}"
        elif settings.use_fastest_configuration and not KNOBS_BY_KEY[key].switch:
            reason = "cannot be changed on a model that is already built"
            remedy = "Let tune-adaptive plan --fastest choose it, or leave it out"
        else:
            continue
        raise ConfigError(f"{BLOCK}.may_change", key, reason, remedy)


def require_torchvision(cfg: DictConfig) -> None:
    """Raise ``ConfigError`` where images are to be trained on without the library that takes them."""
    if has_images(cfg) and find_spec("torchvision") is None:
        raise missing_torchvision("collate_fn", cfg.collate_fn)


def missing_torchvision(key: str, value: object, error: BaseException | None = None) -> ConfigError:
    """The error where torchvision is needed and not installed or, as the error tells, of no use."""
    reason = "is not installed"
    if error is not None and find_spec("torchvision") is not None:
        reason = f"cannot be used ({str(error).splitlines()[0].rstrip('.')}): it was built for another torch"
    torch = version("torch").partition("+")[0]
    return ConfigError(
        key,
        value,
        f"needs torchvision for its images, which {reason}",
        f"Install the one for your torch: pip install torchvision torch=={torch}, from the index that torch "
        "came from",
    )


def token_budget_with_images(settings: AdaptiveSettings) -> ConfigError:
    return ConfigError(
        f"{BLOCK}.token_budget",
        settings.token_budget,
        "sizes micro-batches by their text, but these samples have images: a micro-batch is padded to the "
        "most images and tiles of any of its samples, so how many samples fit does not depend on text alone",
        "Set it to False; use_maximum_batch_size=True accounts for images",
    )
