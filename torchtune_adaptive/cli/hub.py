"""The model that ``--hf`` names: a folder, or a model of the Hugging Face Hub. Its ``config.json`` is read.

A name is looked for in the Hub's local cache first. What is downloaded is put there by huggingface_hub, which
reads ``HF_TOKEN``, ``HF_HOME``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtune_adaptive.common import ConfigError, network

_FILE = "config.json"
_SHAPE = (
    *(
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "n_embd",
        "n_head",
    ),
    *("n_layer", "n_positions", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    "vocab_size",
)
"""Keys whose values are 1 or more, or null."""
_MOST_PARTS, _LARGEST = 10_000, 1 << 31
"""The most of what is built one by one, as layers, and of the others of these."""
_REQUEST_SECONDS = 5.0
_SECONDS = 20.0
"""How long the Hub may take in all: a server that goes on sending a little never exceeds a request's time."""


@dataclass(frozen=True)
class GivenModel:
    """A model whose ``config.json`` is here."""

    name: str
    """Its name on the Hub, or that of its folder."""
    folder: Path
    source: str = ""
    """Where the Hub's ``config.json`` was found; empty for a folder."""

    @property
    def given(self) -> str:
        """What to type for it."""
        return self.name if self.source else str(self.folder)

    @property
    def about(self) -> tuple[str, ...]:
        """Where it comes from, and torchtune's configs of it, for people."""
        lines = [f"config.json: of {self.name}, {self.source}"] if self.source else []
        if configs := torchtune_configs_of(self.name):
            lines.append(f"torchtune has configs for {self.name}: {', '.join(configs)}")
        return tuple(lines)


def model_of(given: str) -> GivenModel:
    """The model that is meant by a folder, the path of a ``config.json``, or a name on the Hub. What exists
    here comes before what the Hub has by the same name.

    Raises:
        ConfigError: the Hub's model cannot be had.
    """
    path = Path(given).parent if Path(given).name == _FILE else Path(given)
    if path.exists() or not is_name(given):
        return GivenModel(path.resolve().name, path)
    return _of_hub(given)


def require_config(folder: Path) -> None:
    """Raise if a folder has no ``config.json`` that can be read, or one of no model.

    Raises:
        ConfigError: there is none, or it makes no sense.
    """
    path = folder / _FILE
    try:
        about = json.loads(path.read_text())
        wrong = _implausible(about)
    except OSError as error:
        reason = f"has no {_FILE} that can be read ({error.strerror})"
        remedy = "Give the folder of a model, or its name on the Hub as ORG/NAME"
        raise ConfigError("--hf", str(path.parent), reason, remedy) from None
    except (ValueError, RecursionError) as error:
        reason = f"is not JSON ({error})"
        raise ConfigError("--hf", str(path), reason, "Download it again") from None
    if not isinstance(about, dict):
        raise ConfigError("--hf", str(path), "is not a JSON object", "Download it again")
    if wrong:
        raise ConfigError("--hf", str(path), f"has {wrong}", "Correct it, or give another model")


def _implausible(value: Any, key: str = "") -> str:
    """What no model has, or takes for ever to build, in a config or the value of a key; empty if nothing."""
    if isinstance(value, dict) and key not in _SHAPE:
        return next(filter(None, (_implausible(one, name) for name, one in value.items())), "")
    given = [one for one in (value if isinstance(value, list) else [value]) if one is not None]
    most = _MOST_PARTS if key.endswith(("layer", "layers", "experts")) else _LARGEST
    meant, wrong = f"a whole number from 1 to {most:,}", False
    if key == "architectures":
        meant, wrong = "a name", not all(isinstance(one, str) for one in given)
    elif key in _SHAPE:
        wrong = any(type(one) is not int or not 1 <= one <= most for one in given)
    elif most == _MOST_PARTS:
        wrong = any(type(one) is int and one > most for one in given)
    return f"{key}: {repr(value)[:40]}, which is not {meant}" if wrong else ""


def is_name(given: str) -> bool:
    """Whether this may be the name of a model on the Hub: ``ORG/NAME``."""
    return re.fullmatch(r"[\w.-]*\w/\w[\w.-]*", given) is not None


def instead_of_config(given: str) -> str | None:
    """What to write where a model is given in place of a config; None if it is no model."""
    if not is_name(given) and not (Path(given) / _FILE).is_file():
        return None
    option = f"For a model of the Hub, or its folder: --hf {given}"
    if not (configs := torchtune_configs_of(given)):
        return option
    return f"torchtune's configs of this model are {', '.join(configs)}. {option}"


def torchtune_configs_of(name: str) -> Sequence[str]:
    """torchtune's configs of a model, by its name; none where torchtune is not installed."""
    if find_spec("torchtune") is None:
        return ()
    try:
        from torchtune_adaptive.recipe import configs_of_model
    except ImportError:  # the library is installed alone
        return ()
    return configs_of_model(name)


def _of_hub(name: str) -> GivenModel:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        reason = (
            "is no folder here, and names of the Hub need huggingface_hub, which is not installed"
        )
        raise _not_had(name, reason, "pip install huggingface_hub") from None
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, _FILE)
    except HFValidationError as error:
        reason = f"is neither a folder here nor a name that the Hub can have ({error})"
        raise ConfigError("--hf", name, reason, "Write ORG/NAME, or give a folder") from None
    if isinstance(cached, str):  # else it is unknown, or known to have been missing
        return _found(name, cached, "in the Hub's local cache")
    return _found(name, _downloaded(name), "from the Hub")


def _found(name: str, file: str, where: str) -> GivenModel:
    folder = Path(file).parent  # named by the revision
    return GivenModel(name, folder, f"{where}, revision {folder.name[:7]}")


def _downloaded(name: str) -> str:
    """The file of a model, in the local cache.

    Raises:
        ConfigError: the Hub does not give it, or not in time.
    """
    from huggingface_hub import constants, errors, get_token

    hub = constants.ENDPOINT
    login = "`hf auth login` or set HF_TOKEN"
    token = "your token" if get_token() else "no token"
    try:
        return network.within(_SECONDS, lambda: _download(name))
    except errors.OfflineModeIsEnabled:
        reason = f"is not in the local cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set"
        remedy = "Unset it"
    except errors.GatedRepoError:
        reason = f"is gated, and {token} gives no access to it"
        remedy = f"Ask for access at {hub}/{name}, then {login}"
    except errors.RepositoryNotFoundError:
        reason = f"is neither a folder here nor a model that {hub} shows to {token}"
        remedy = f"Correct the name; if the model is private, {login}"
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):  # the connection has failed meanwhile
            reason, remedy = _unreachable(hub, error)
        else:
            reason = f"has no {_FILE}, as repositories of adapters or GGUF files"
            remedy = "Name the model that it was made from"
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        reason = f"was not given by {hub}, which answers with status {status}"
        remedy = f"Your token may be wrong: {login}" if status in (401, 403) else "Try again later"
    except Exception as error:  # the HTTP library's, which is another one with each version
        reason, remedy = _unreachable(hub, error)
    raise _not_had(name, reason, remedy)


def _download(name: str) -> str:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    # hf_hub_download alone tries again for minutes where the Hub does not answer. This does not.
    get_hf_file_metadata(hf_hub_url(name, _FILE), timeout=_REQUEST_SECONDS)
    return hf_hub_download(name, _FILE, etag_timeout=_REQUEST_SECONDS)


def _unreachable(hub: str, error: Exception) -> tuple[str, str]:
    said = " ".join(str(error).split()) or "no answer"
    reason = (
        f"is not in the local cache, and {hub} cannot be reached ({type(error).__name__}: {said})"
    )
    return reason, "Look at the network and its proxy"


def _not_had(name: str, reason: str, remedy: str) -> ConfigError:
    """The error about a model of the Hub, with what to do without the Hub."""
    download = f"`hf download {name} {_FILE} --local-dir DIR`"
    remedy += f". Or get its {_FILE} elsewhere ({download}) and give --hf DIR"
    if configs := torchtune_configs_of(name):
        remedy += f", or plan one of torchtune's configs of this model: {', '.join(configs)}"
    return ConfigError("--hf", name, reason, remedy)
