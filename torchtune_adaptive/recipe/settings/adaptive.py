"""The settings that this package adds to a torchtune config.

``AdaptiveSettings.from_config`` reads them: some keys at top level, the others in the block
``adaptive_batching``. Inside the block every key is known and typed; an unknown one is an error, so a
misspelled setting is never silently its default. ``null`` means the default.

The annotation of a field says what it may be (see ``rules``), and its docstring is its documentation:
``python docs/make/settings.py`` makes the tables of ``docs/settings.md`` from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.core import LrScaling, Rounding, strategies
from torchtune_adaptive.recipe.settings.mistakes import FIRST, Each
from torchtune_adaptive.recipe.settings.rules import (
    CHECKPOINTING,
    COMPONENT,
    FOLDER,
    FUNCTION,
    KEYS,
    MEMORY,
    NEVER,
    PATIENCE,
    SECONDS,
    SHARE,
    Rule,
    at_least,
    either,
    rule_of,
)

BLOCK = "adaptive_batching"
FORMER = {"workers": "num_workers"}
"""Names that keys of the block had in version 0.1.0, which are read too."""


def _setting(
    default: Any, *, memory: bool = True, result: bool = False, top_level: bool = False
) -> Any:
    """A setting, with what ``keys.Key`` says of torchtune's keys.

    Args:
        default: its value where the config has none.
        memory: whether it can change what a search finds.
        result: whether it can change what is trained, by more than rounding, or than a resumed run keeps.
        top_level: whether its key stands beside torchtune's, not in the block.
    """
    known = {"memory": memory, "result": result, "top_level": top_level}
    return field(default=default, metadata=known)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveSettings:
    """What a config says about adaptive batching, checked and typed."""

    use_maximum_batch_size: bool = _setting(False, top_level=True)
    """Search for the largest micro-batch that fits, then train with it."""

    batch_increase_function: (
        Annotated[str, FUNCTION] | Annotated[Mapping[str, Any], COMPONENT] | None
    ) = _setting(None, result=True, top_level=True)
    """Grow the batch during training: the dotted path of a function ``f(epoch, current_batch_size) ->
    increment``, or a ``_component_`` (docs/growing-the-batch.md). A search finds out how far it can grow."""

    # It chooses among configs that each have facts of their own.
    use_fastest_configuration: bool = _setting(False, memory=False, top_level=True)
    """Choose the memory knobs (checkpointing, parameters kept after forward, ...) that train fastest within
    the memory there is, at the configured global batch (docs/fastest.md)."""

    save_every_n_steps: Annotated[int, at_least(1)] | None = _setting(
        None, memory=False, top_level=True
    )
    """Save a mid-epoch checkpoint (``epoch_<n>_step_<step>``) every N steps; the newest two stay. Resuming
    from one continues at the exact sample."""

    keep_last_n_checkpoints: Annotated[int, at_least(1)] | None = _setting(
        None, memory=False, top_level=True
    )
    """Keep only the newest N checkpoints. By default the newest two that can be resumed from are kept, and
    the weights of all epochs (docs/checkpoints.md)."""

    sharded_checkpoints: Literal["background"] | bool | None = _setting(None, memory=False)
    """Let each rank save its part of a checkpoint, in place of gathering all on rank 0; ``background``: while
    training continues. By default, where a gather would take more than a quarter of its host's free memory,
    and with several machines (docs/checkpoints.md)."""

    snapshot_every_n_steps: Annotated[int, at_least(1)] | None = _setting(None, memory=False)
    """Take a snapshot every N steps while training goes on: a sharded checkpoint in the machine's memory,
    from which a restart goes on; of several machines, each keeps a copy of another one's part. The newest two
    are kept, until the run ends (docs/checkpoints.md)."""

    snapshot_folder: Annotated[str, FOLDER] | None = _setting(None, memory=False)
    """The folder for snapshots, on each machine. By default ``/dev/shm``, which is memory; where there is
    none, the output folder."""

    # All ways to search find the same size.
    search: strategies.Strategy | Literal["predict"] = _setting("extrapolate", memory=False)
    """The way to search. ``extrapolate``, ``bisect`` and ``halve`` find the same size in different numbers of
    trials; ``predict`` confirms a predicted size with one trial and learns from it (docs/planning.md)."""

    rounding: Rounding = _setting("power_of_two")
    """The sizes that are candidates: powers of two, divisors of the samples per rank in a step
    (``divisor``), or all (``none``)."""

    ceiling: Annotated[int, at_least(1)] | None = _setting(None)
    """The largest micro-batch to try. Where it is not set, an epoch keeps at least 20 optimizer steps, or as
    many as the config has if those are fewer."""

    headroom: Annotated[float, SHARE] = _setting(0.05)
    """Fraction of the capacity that a trial must leave free; the rest is the usable memory."""

    memory_limit: Annotated[int, MEMORY] | None = _setting(None)
    """Behave like a device with this much memory, e.g. ``24GiB`` (on a GPU, a real cap; on a CPU, a simulated
    device)."""

    # It decides the length of the trials, which is a fact itself.
    probe_length: Annotated[int, at_least(2, 1 << 24)] | None = _setting(None, memory=False)
    """Tokens per sample in the trials; no sample may be longer. By default the longest sample of the data or,
    where there are too many to look at each, ``max_seq_len`` of the tokenizer or the dataset."""

    keep_global_batch: bool = _setting(False)
    """Keep micro-batch x accumulation x ranks exactly as configured: the largest divisor that fits becomes
    the micro-batch, and accumulation makes up for it."""

    activation_checkpointing: Annotated[str, CHECKPOINTING] | None = _setting(None)
    """The activations that are computed again in backward: those of ``all`` layers, of ``none``, of the first
    so many (``12_of_32``), of each n-th (``every_2``), or of cheap ``operations`` only, which keeps the
    results of matrix products and attention. By default as enable_activation_checkpointing and ac_mode say.
    Losses and weights do not depend on it."""

    recompute_loss: bool = _setting(False)
    """Compute the logits of each chunk of torchtune's chunked loss again in backward, instead of keeping
    them. Losses and weights do not depend on it."""

    may_change: Literal["exact", "rounding"] | Annotated[tuple[str, ...], KEYS] = _setting(
        "exact", memory=False
    )
    """The knobs that use_fastest_configuration may change: those that change no bit of the training where
    kernels are deterministic (``exact``; docs/determinism.md), also those that change the order of sums
    (``rounding``), or a list of keys (docs/fastest.md)."""

    speed_trials: Annotated[int, at_least(1, 64)] = _setting(3, memory=False)
    """The most configurations that use_fastest_configuration times, besides the config's own."""

    cache: bool | Annotated[str, FOLDER] = _setting(True, memory=False)
    """Cache search results, sample lengths, traces and prediction errors: ``True`` = the user cache folder, a
    path = that folder, ``False`` = off. A cached size is confirmed by one trial."""

    token_budget: bool | Annotated[int, at_least(1)] = _setting(False, result=True)
    """Size micro-batches in tokens instead of samples: ``True`` finds how many samples of each length fit; a
    number is the most tokens in a micro-batch, padding included (docs/token-budgets.md)."""

    # Each phase is searched by itself.
    generation_batch_size: Annotated[int, at_least(1)] | None = _setting(None, memory=False)
    """Rows that are generated at once on each rank in reinforcement learning (docs/reinforcement.md); a
    search does not change it. By default a search finds it, or forward_batch_size says it."""

    scoring_batch_size: Annotated[int, at_least(1)] | None = _setting(None, memory=False)
    """Rows whose log-probabilities are computed at once on each rank; the same otherwise."""

    scoring_token_budget: Annotated[int, at_least(1)] | None = _setting(None, memory=False)
    """The most tokens that are scored at once on each rank, padding included. By default, token_budget has it
    found as well."""

    grow_past_memory: bool = _setting(False, result=True)
    """Let the global batch grow by accumulation once the micro-batch is the largest that fits."""

    lr_scaling: LrScaling | None = _setting(None, memory=False, result=True)
    """The way the learning rate follows a growing batch: ``none``, ``sqrt``, ``linear``, or ``gain`` (what
    the batch is worth at the measured noise scale). By default as the schedule says: ``sqrt`` for
    ``Seesaw``, ``none`` for the others."""

    beta2: Literal["fixed", "half_life"] = _setting("fixed", memory=False, result=True)
    """Adam's second beta: ``fixed`` as configured, or ``half_life``: averages over the same number of samples
    as the batch grows."""

    resume_learning_rate: Literal["checkpoint", "config"] = _setting("checkpoint", memory=False)
    """The learning rate of a resumed run: that of the ``checkpoint``, or that of the ``config``, as if it had
    been that from the beginning (docs/checkpoints.md)."""

    gradient_noise: Literal["off", "observe", "act"] = _setting("off", result=True)
    """The gradient noise scale: ``observe`` logs it, in samples; ``act`` also grows the batch by it, with
    ``GradientNoise()``."""

    sample_order: Literal["torchtune", "streaming"] = _setting(
        "torchtune", memory=False, result=True
    )
    """The order of samples where ``shuffle`` is ``True``: that of ``torchtune``, of which a rank
    keeps its own samples (with token_budget, those of all ranks); or ``streaming``, another random order that
    takes no memory and no time to make, for hundreds of millions of samples. A resumed run keeps its order
    (docs/how-it-works.md)."""

    dropout: Literal["torch", "sample"] = _setting("torch", result=True)
    """The random numbers of dropout: those of ``torch``, as in torchtune, which follow the ranks and the
    micro-batches; or of the ``sample``: the same on any ranks, in micro-batches of any size
    (docs/determinism.md)."""

    num_workers: Annotated[int, at_least(0, 256)] = _setting(0, memory=False)
    """Processes per rank that fetch and collate rows ahead. ``workers``, its name in version 0.1.0, is read
    too."""

    on_out_of_memory: Literal["shrink", "raise"] | None = _setting(None)
    """The response to a training step that runs out of memory: ``shrink`` retries it with more checkpointing,
    then with micro-batches of at most half the size; ``raise`` stops. By default ``shrink``, except where a
    step cannot be retried (optimizer_in_bwd; compile with tensor_parallel_dim or context_parallel_dim)."""

    grow_back_after: Annotated[int | None, either(at_least(1), NEVER)] = _setting(100, memory=False)
    """Steps without running out of memory after which a size that failed in training is tried again, or
    ``never``. Each further failure doubles the wait."""

    wait_for_memory: Annotated[float, PATIENCE] = _setting(30.0, memory=False)
    """Seconds to wait, in all, when a training step runs out of memory at size 1: memory may be short for a
    moment only, because of another process. Each wait is as long as all before it."""

    rank_timeout: Annotated[float, SECONDS] = _setting(45.0, memory=False)
    """Seconds after which an unresponsive rank is considered lost and the run is aborted."""

    step_timeout: Annotated[float, SECONDS] = _setting(600.0, memory=False)
    """The same for a rank that is alive but makes no progress in a training step while others wait."""

    stop_timeout: Annotated[float, SECONDS] = _setting(300.0, memory=False)
    """Seconds in which training must save a checkpoint and end after SIGTERM or Ctrl-C. Then it ends without
    one (docs/checkpoints.md)."""

    search_only: bool = _setting(False, memory=False)
    """Stop after the search (set by ``tune-adaptive find``)."""

    @property
    def grows(self) -> bool:
        """Whether the batch may grow during training."""
        return self.batch_increase_function is not None or self.gradient_noise == "act"

    @property
    def shrinks(self) -> bool:
        """Whether a training step that runs out of memory is retried."""
        return self.on_out_of_memory != "raise"

    @property
    def budgets(self) -> bool:
        """Whether micro-batches are sized in tokens."""
        return self.token_budget is not False

    @property
    def searches(self) -> bool:
        """Whether the largest micro-batch must be known."""
        return (self.use_maximum_batch_size or self.grows) and not self.budgets

    @property
    def predicts(self) -> bool:
        """Whether a search starts from a prediction."""
        return self.searches and self.search == "predict"

    @property
    def adapts(self) -> bool:
        """Whether the run decides about its batch, and keeps its decisions when it is resumed."""
        return (
            self.use_maximum_batch_size
            or self.use_fastest_configuration
            or self.grows
            or self.budgets
        )

    @property
    def tries_sizes(self) -> bool:
        """Whether the run tries sizes before it trains: one that decides about its batch does."""
        return self.adapts

    @property
    def survives(self) -> bool:
        """Whether ranks must stay together when one of them runs out of memory."""
        return self.adapts or self.shrinks

    def agreement_timeout(self, compiled: bool) -> float:
        """Seconds that ranks wait for each other to agree: long enough for the watchdog to report first
        and, where anything is compiled, for a rank that compiles while another has it cached."""
        return 3600.0 if compiled else 2 * max(self.rank_timeout, self.step_timeout)

    @classmethod
    def from_config(cls, cfg: DictConfig, each: Each = FIRST) -> AdaptiveSettings:
        """Read and check everything that this package adds to a torchtune config.

        Args:
            cfg: the whole config.
            each: a context for each check; what it notes has its default.

        Raises:
            ConfigError: a key is unknown, or its value is not valid.
        """
        block = cfg.get(BLOCK)
        if block is None:
            block = {}
        elif not isinstance(block, DictConfig):
            raise ConfigError(
                BLOCK,
                plain_value(cfg, BLOCK),
                "is not a block",
                "Write `key: value` lines below it",
            )
        given = {}
        for key in block:
            name, value = f"{BLOCK}.{key}", plain_value(block, key)
            current = FORMER.get(key, key)
            with each:
                if current not in block_keys():
                    raise _unknown(str(key), value)
                if current != key and current in block:
                    raise ConfigError(
                        name,
                        value,
                        f"is the former name of {current}, which is set too",
                        "Remove it",
                    )
                given[current] = (name, value)
        given |= {key: (key, plain_value(cfg, key)) for key in sorted(top_level_keys())}
        values = {}
        for key, (name, value) in given.items():
            with each:
                if value is not None:
                    values[key] = _rules()[key].read(name, value)
        return cls(**values)


def keys_with(flag: Literal["memory", "result", "top_level"]) -> frozenset[str]:
    """Our keys for which this is so (see ``_setting``)."""
    return frozenset(f.name for f in fields(AdaptiveSettings) if f.metadata[flag])


def top_level_keys() -> frozenset[str]:
    """Our keys that stand beside torchtune's."""
    return keys_with("top_level")


def block_keys() -> frozenset[str]:
    """Our keys inside the block."""
    return frozenset(f.name for f in fields(AdaptiveSettings)) - top_level_keys()


@cache
def _rules() -> dict[str, Rule]:
    hints = get_type_hints(AdaptiveSettings, include_extras=True)
    return {name: rule_of(annotation) for name, annotation in hints.items()}


def plain_value(node: DictConfig, key: Any) -> Any:
    """A value as Python's own types have it, for rules and messages; None where there is none."""
    value = node.get(key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def close_match(key: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known key that a wrong one was probably meant to be, whatever its letters' case."""
    found = get_close_matches(key.lower(), sorted(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def _unknown(key: str, value: object) -> ConfigError:
    name = f"{BLOCK}.{key}"
    if key.lower() in top_level_keys():
        remedy = f"It belongs at top level, outside of {BLOCK}: {key.lower()}={value}"
        return ConfigError(name, value, "is in the wrong place", remedy)
    meant = close_match(key, block_keys())
    remedy = f"Did you mean {meant}?" if meant else f"Known are {', '.join(sorted(block_keys()))}"
    return ConfigError(name, value, "is set, but there is no such setting", remedy)
