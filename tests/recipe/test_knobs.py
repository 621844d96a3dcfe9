"""The table of memory knobs: what may be chosen for a config, and how a choice is written."""

from __future__ import annotations

import pickle
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest

from tests.helpers import tiny_vision
from tests.helpers.configs import config
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.core.step.knobs import (
    CHECKPOINT,
    LOSS,
    MICRO_BATCH,
    OFFLOADING,
    RECOMPUTE_LOSS,
    Choice,
    checkpointed_share,
    first_layers,
)
from torchtune_adaptive.core.step.recompute import recomputed_layers
from torchtune_adaptive.recipe.search.fastest_search import to_begin_with
from torchtune_adaptive.recipe.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.checks import check
from torchtune_adaptive.recipe.settings.kind_table import KINDS, kind_of
from torchtune_adaptive.recipe.settings.knob_table import (
    ACCUMULATION,
    KNOBS,
    WHOLE,
    changes,
    choices,
    configured_checkpoint,
    configured_choice,
    overrides,
    with_choice,
)

CONFIGS = ["tiny/full", "tiny/lora", "llama3_1/8B_full", "llama3_2/1B_lora_single_device"]


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, "cuda") for name in CONFIGS), *((name, "cpu") for name in CONFIGS if "tiny" in name)],
)
@pytest.mark.parametrize("may_change", ["exact", "rounding", ("compile", "batch_size")])
def test_every_choice_becomes_the_config_that_it_is_read_from(
    name: str, device: str, may_change: Any
) -> None:
    asked = Asked.of(config(name, device=device))
    cfg, found = asked.cfg, choices(asked, 2, may_change)
    assert found[0] == configured_choice(asked, 2)
    for choice in [*found[:: len(found) // 8 + 1], found[-1]]:
        chosen = with_choice(asked, 2, choice)
        assert configured_choice(chosen, 2) == choice
        changed = chosen.cfg
        check(changed, kind_of(changed))  # no choice is one that a run would refuse
        assert changed.batch_size * changed[ACCUMULATION] == cfg.batch_size * cfg[ACCUMULATION]
        assert bool(overrides(cfg, changed)) == (choice != found[0])
    assert len(set(found)) == len(found)


def test_only_what_is_allowed_changes() -> None:
    cfg = Asked.of(config("llama3_1/8B_full", custom_sharded_layers=None))
    own = configured_choice(cfg, 8)
    for may_change, effects in (("exact", {"exact"}), ("rounding", {"exact", "rounding"})):
        changed = [c for one in choices(cfg, 8, may_change) for c in changes(own, one)]
        assert {change.effect for change in changed} == effects
    named = {change.key for one in choices(cfg, 8, (LOSS,)) for change in changes(own, one)}
    assert named == {LOSS}
    switches = choices(cfg, 8, "rounding", switches_only=True)
    fixed = {knob.key for knob in KNOBS if not knob.switch}
    assert not {change.key for one in switches for change in changes(own, one)} & fixed


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_activations_are_offloaded_from_cuda_where_there_are_no_images(
    device: str, images: bool
) -> None:
    name = str(tiny_vision.CONFIGS / "full_vision.yaml") if images else "tiny/full"
    cfg = Asked.of(config(name, device=device))
    offloads = [one.get(OFFLOADING) for one in choices(cfg, 1, "exact")]
    assert any(offloads) is (device == "cuda" and not images)
    if images:
        assert offloads == [None] * len(offloads), (
            "no knob, so nothing that another run could say of it"
        )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "none"),
        ({"enable_activation_checkpointing": True}, "all"),
        ({"ac_mode": "full"}, "all"),
        ({"ac_mode": "none"}, "none"),
        ({"ac_mode": "selective", "ac_option": 1}, "all"),
        ({"ac_mode": "selective", "ac_option": 3}, "every_3"),
        ({"ac_mode": "selective", "ac_option": "op"}, "operations"),
        # torchtune's recipe does neither
        ({"ac_mode": "selective", "ac_option": 2, "enable_activation_checkpointing": True}, "none"),
        ({CHECKPOINT: "every_2", "enable_activation_checkpointing": True}, "every_2"),
        ({CHECKPOINT: "none", "enable_activation_checkpointing": True}, "none"),
        ({CHECKPOINT: "3_of_4"}, "3_of_4"),
    ],
)
def test_torchtunes_keys_for_checkpointing(keys: dict[str, Any], expected: str) -> None:
    assert configured_checkpoint(Asked.of(config(**keys))) == expected


def test_overrides_can_be_typed() -> None:
    cfg = config(batch_size=4, **{"loss.num_output_chunks": 4})
    asked = Asked.of(cfg)
    choice = configured_choice(asked, 2) | {MICRO_BATCH: 2, LOSS: WHOLE}
    changed = with_choice(asked, 2, choice).cfg
    assert sorted(overrides(cfg, changed)) == [
        "batch_size=2",
        "gradient_accumulation_steps=2",
        f"loss._component_={WHOLE}",
        "~loss.num_output_chunks",
    ]
    assert changed.loss == {"_component_": WHOLE}
    assert str(changes(configured_choice(asked, 2), choice)[0]) == "batch_size: 4 -> 2 (rounding)"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({CHECKPOINT: "every"}, CHECKPOINT),
        ({CHECKPOINT: "every_1"}, CHECKPOINT),
        ({CHECKPOINT: "0_of_4"}, CHECKPOINT),
        ({CHECKPOINT: "4_of_4"}, "K_of_N layers, e.g. 12_of_32"),
        ({CHECKPOINT: "5_of_4"}, CHECKPOINT),
        ({CHECKPOINT: "2 of 4"}, CHECKPOINT),
        ({CHECKPOINT: "operations", "compile": True}, CHECKPOINT),
        (
            {"adaptive_batching.recompute_loss": True, LOSS: WHOLE},
            "adaptive_batching.recompute_loss",
        ),
        ({OFFLOADING: True, "enable_activation_checkpointing": True}, "device is cpu"),
        ({OFFLOADING: True, "device": "cuda"}, "checkpointing of whole layers"),
        (
            {
                OFFLOADING: True,
                "enable_activation_checkpointing": True,
                "device": "cuda",
                "collate_fn": "torchtune.data.padded_collate_tiled_images_and_mask",
            },
            f"{OFFLOADING}: True .* images",
        ),
        ({"adaptive_batching.may_change": ["lr"]}, "adaptive_batching.may_change"),
        ({"adaptive_batching.may_change": []}, "adaptive_batching.may_change"),
        (
            {"adaptive_batching.may_change": ["compile"], "use_fastest_configuration": True},
            "adaptive_batching.may_change",
        ),
        (
            {"use_maximum_batch_size": True, "use_fastest_configuration": True},
            "use_fastest_configuration",
        ),
        (
            {"adaptive_batching.token_budget": True, "use_fastest_configuration": True},
            "use_fastest_configuration",
        ),
    ],
)
def test_what_cannot_work_is_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check(config(**{"use_maximum_batch_size": False, **keys}), KINDS["full"])


def test_a_choice_is_compared_by_its_values() -> None:
    own = Choice({CHECKPOINT: "every_2", OFFLOADING: False})
    same = Choice({OFFLOADING: False, CHECKPOINT: "every_2"})
    assert own == same == dict(own) and hash(own) == hash(same) and {own: 1}[same] == 1
    more = own | {CHECKPOINT: "none"}
    assert own[CHECKPOINT] == "every_2" and more[CHECKPOINT] == "none" != own
    assert pickle.loads(pickle.dumps(more)) == more
    with pytest.raises(TypeError):
        own[CHECKPOINT] = "all"  # type: ignore[index]


def test_what_is_certainly_leaner() -> None:
    def choice(checkpoint: str, offloading: bool = False, recompute: bool = False) -> Choice:
        return Choice({CHECKPOINT: checkpoint, OFFLOADING: offloading, RECOMPUTE_LOSS: recompute})

    lean, moved, again = choice("all"), choice("all", True), choice("all", recompute=True)
    assert lean.leaner_than(choice("every_2")) and choice("every_2").leaner_than(choice("every_4"))
    assert not choice("every_4").leaner_than(choice("every_2"))
    assert not choice("every_2").leaner_than(choice("operations"))
    some = ["none", "1_of_4", "2_of_4", "3_of_4", "all"]
    for more, fewer in pairwise(map(choice, some)):
        assert fewer.leaner_than(more) and not more.leaner_than(fewer)
    # Of as many layers the first are kept for the shortest time, and of others it is not certain.
    assert choice("2_of_4").leaner_than(choice("every_2"))
    assert not choice("every_2").leaner_than(choice("1_of_4"))
    assert not choice("1_of_4").leaner_than(choice("operations"))
    assert choice("operations").leaner_than(choice("none"))
    assert lean.needs_as_much_as(lean) and not lean.leaner_than(lean)
    assert moved.leaner_than(lean) and not again.leaner_than(lean) and not lean.leaner_than(again)
    allowed = [choice("none"), lean, again, moved]
    assert Choice.leanest(allowed) == [again, moved]
    # The first steps of a search do not offload, unless nothing else fits.
    assert to_begin_with(allowed) == [lean, again, moved]
    assert to_begin_with([moved]) == [moved] and to_begin_with(allowed[:2]) == [lean]


@pytest.mark.parametrize(
    ("checkpointing", "expected"),
    [
        ("none", ""),
        ("1_of_4", "1"),
        ("3_of_4", "123"),
        ("every_2", "24"),
        ("every_3", "3"),
        ("all", "1234"),
    ],
)
def test_which_layers_are_checkpointed(checkpointing: str, expected: str) -> None:
    parts = recomputed_layers(checkpointing, 4)
    numbers = [str(n) for n, part in enumerate(parts, 1) if part == "everything"]
    assert "".join(numbers) == expected and set(parts) <= {"everything", "nothing"}


def test_any_number_of_layers_may_be_chosen() -> None:
    asked = Asked.of(config())
    found = {one[CHECKPOINT] for one in choices(asked, 1, (CHECKPOINT,), layers=5)}
    assert found == {*(first_layers(count, 5) for count in range(6)), "operations"}
    shares = [checkpointed_share(first_layers(count, 5)) for count in range(6)]
    assert shares == [Fraction(count, 5) for count in range(6)]
    assert checkpointed_share("operations") == 0
    # Where their number is not known, and the config's own, as old configs have it.
    old = Asked.of(config(**{CHECKPOINT: "every_3"}))
    found = {one[CHECKPOINT] for one in choices(old, 1, (CHECKPOINT,))}
    assert found == {"none", "operations", "all", "every_3"}


def test_a_list_of_keys_is_read() -> None:
    cfg = config(**{"adaptive_batching.may_change": ["batch_size", CHECKPOINT]})
    assert AdaptiveSettings.from_config(cfg).may_change == ("batch_size", CHECKPOINT)
