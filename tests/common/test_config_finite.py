"""No setting takes NaN or infinity: a lease that never ends, or a learning rate of infinity, is a mistake."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from pydantic import Field
from pydantic.fields import FieldInfo

from paramserver.common.config.flags import settings
from paramserver.common.config.option import Section
from paramserver.common.config.sources import load_config
from paramserver.common.errors import UsageError
from paramserver.launch.plan.hosts import Host


def holds_floats(annotation: Any) -> bool:
    return annotation is float or any(map(holds_floats, get_args(annotation)))


def floats(fields: dict[str, FieldInfo]) -> list[str]:
    return [key for key, info in fields.items() if holds_floats(info.annotation)]


FLOATS = floats(settings())
EXTRAS = ["optimizer.eps", "optimizer.weight_decay", "optimizer.betas"]  # arguments of a torch class: no fields
TEXTS = {".inf": "inf", "-.inf": "-inf", ".nan": "nan", "1e999": "inf"}


def value_of(key: str, text: str) -> str:
    in_dict = key.startswith("launch.ray_") and not key.endswith("_s")
    return f"{{CPU: {text}}}" if in_dict else f"[0.9, {text}]" if key.endswith("betas") else text


def test_the_schema_has_settings_to_look_at() -> None:
    assert len(FLOATS) > 24 and {"server.lease_s", "optimizer.lr", "policy.straggler_timeout_s"} < set(FLOATS)


@pytest.mark.parametrize("key", FLOATS + EXTRAS)
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, key: str) -> None:
    """From a file and from --set, with where it was said and what to do."""
    section, _, name = key.partition(".")
    for text, shown in TEXTS.items():
        path = tmp_path / "run.yaml"
        path.write_text(f"{section}:\n  {name}: {value_of(key, text)}\n")
        for origin, sets, file in (
            (f"{path}:2", [], str(path)),
            (f"--set {key}", [f"{key}={value_of(key, text)}"], None),
        ):
            with pytest.raises(UsageError) as caught:
                load_config(file, {}, sets, {})
            assert caught.value.exit_code == 2
            assert caught.value.message.startswith(f"{origin}: {key}") and shown in caught.value.message
            assert "finite number" in caught.value.message and "leave the setting out" in caught.value.fix


@pytest.mark.parametrize("name", floats(Host.model_fields))
def test_a_host_has_no_infinite_price(name: str) -> None:
    with pytest.raises(ValueError, match="finite number"):
        Host.model_validate({"host": "a", name: math.inf})


def test_a_field_that_means_it_may_say_so() -> None:
    class Options(Section):
        for_ever_s: Annotated[float, Field(allow_inf_nan=True)] = 1.0
        limit_s: float = 1.0

    assert Options.model_validate({"for_ever_s": math.inf}).for_ever_s == math.inf
    with pytest.raises(ValueError, match="finite number"):
        Options.model_validate({"limit_s": math.inf})
