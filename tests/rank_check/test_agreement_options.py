"""``rank_agreement`` and ``rank_dependent_parameters`` in every front end, and their errors."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from requestzero import RequestZeRO, RequestZeROPlugin
from requestzero.accelerate.plan import make_plan
from requestzero.config.engine_options import take_engine_options
from requestzero.config.options import RequestZeROSettings
from support.engines import build
from support.ranks import RankGroup
from support.setup import Setup

CHOSEN = {"rank_agreement": False, "rank_dependent_parameters": True}


def test_deepspeed_config() -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 2}, "requestzero": dict(CHOSEN)}
    options = take_engine_options(config)
    assert (options.rank_agreement, options.rank_dependent_parameters) == (False, True)
    assert config == {"zero_optimization": {"stage": 2}}
    options = take_engine_options(config)
    assert (options.rank_agreement, options.rank_dependent_parameters) == (True, False)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"requestzero": {"rank_agrement": False}}, "rank_agrement is no option: .* Did you mean 'rank_agreement'"),
    ({"requestzero": {"rank_agreement": 1}}, "requestzero.rank_agreement=1 is not allowed: use true or false"),
    ({"requestzero": [1]}, r"requestzero=\[1\] is not allowed: DeepSpeed wants a mapping"),
    (
        {
            "requestzero": {"rank_dependent_parameters": True},
            "zero_optimization": {"ignore_unused_parameters": False},
        },
        "ignore_unused_parameters=False would see none of them: leave one of the two out",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take_engine_options(config)


@pytest.mark.parametrize("name", sorted(CHOSEN))
def test_settings_are_bools(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='yes' is not allowed: use true or false"):
        RequestZeROSettings(**{name: "yes"})


def test_lightning() -> None:
    for strategy in (RequestZeRO(**CHOSEN), RequestZeRO(config={"requestzero": CHOSEN})):  # type: ignore[arg-type]
        assert strategy.config is not None
        assert strategy.config["requestzero"] == CHOSEN
        assert vars(strategy.settings).items() >= CHOSEN.items()
    with pytest.raises(ValueError, match=r"requestzero.rank_agreement is False in .* and True in config"):
        RequestZeRO(rank_agreement=False, config={"requestzero": {"rank_agreement": True}})
    with pytest.raises(ValueError, match="Did you mean 'rank_agreement'"):
        RequestZeRO(config={"requestzero": {"rank_agreements": True}})


def test_accelerate() -> None:
    nothing = {item.name: None for item in fields(RequestZeROPlugin)}
    for given in (CHOSEN, {"options": CHOSEN}, {"hf_ds_config": {"requestzero": CHOSEN}}):
        settings = make_plan({**nothing, **given}, {}).settings
        assert vars(settings).items() >= CHOSEN.items()
    with pytest.raises(ValueError, match=r"requestzero.rank_agreement is False in .* and True in"):
        make_plan({**nothing, "rank_agreement": False, "options": {"rank_agreement": True}}, {})
    public = {"zero_optimization": {"ignore_unused_parameters": False}}
    plugin = SimpleNamespace(deepspeed_config=public, plan=SimpleNamespace(own={"requestzero": CHOSEN}))
    with pytest.raises(ValueError, match="ignore_unused_parameters=False would see none of them"):
        RequestZeROPlugin.engine_options.fget(plugin)  # type: ignore[attr-defined]


def announce_nonsense() -> str:
    engine = build(Setup())
    try:
        engine.begin_request("a", micro_batches=0)
    except ValueError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_a_request_has_micro_batches(one_rank: RankGroup) -> None:
    (text,) = one_rank.run(announce_nonsense)
    assert "begin_request(micro_batches=0) is not allowed: use a whole number above 0" in text
