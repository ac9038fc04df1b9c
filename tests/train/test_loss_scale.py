from __future__ import annotations

import pytest

from mpbackend.errors import DocumentError
from mpbackend.roles import LossScaling
from mpbackend.train.loss_scale import LossScale


def dynamic(**settings: float) -> LossScale:
    return LossScale(LossScaling(mode="dynamic", **settings))  # type: ignore[arg-type] # counts and factors in one mapping


def test_without_scaling_the_scale_is_one_and_stays() -> None:
    scale = LossScale(LossScaling(mode="none", init=256.0))
    scale.update(overflowed=True)
    assert scale.value == 1.0


def test_a_static_scale_stays() -> None:
    scale = LossScale(LossScaling(mode="static", init=256.0))
    for overflowed in (True, False):
        scale.update(overflowed=overflowed)
    assert scale.value == 256.0


def test_it_halves_on_overflow_and_doubles_after_the_interval() -> None:
    scale = dynamic(init=1024.0, interval=3)
    seen = []
    for overflowed in (False, False, True, False, False, False, False):
        scale.update(overflowed=overflowed)
        seen.append(scale.value)
    assert seen == [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]


def test_it_stays_within_its_bounds() -> None:
    scale = dynamic(init=4.0, min=2.0, max=8.0, interval=1)
    for _ in range(400):
        scale.update(overflowed=True)
    assert scale.value == 2.0
    for _ in range(400):
        scale.update(overflowed=False)
    assert scale.value == 8.0


def test_hysteresis_waits_for_several_overflows() -> None:
    scale = dynamic(init=1024.0, hysteresis=2)
    scale.update(overflowed=True)
    assert scale.value == 1024.0
    scale.update(overflowed=True)
    assert scale.value == 512.0


def test_the_state_continues_where_it_was() -> None:
    first = dynamic(init=1024.0, interval=3)
    for overflowed in (False, True, False, False):
        first.update(overflowed=overflowed)
    second = dynamic(init=1024.0, interval=3)
    second.load_state_dict(first.state_dict())
    for scale in (first, second):
        scale.update(overflowed=False)
    assert first.state_dict() == second.state_dict()
    assert second.value == 1024.0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"mode": "static"}, "mode"), ({"value": 3.0}, "power of two"), ({"value": 2.0**40}, "not within"), ({"value": "x"}, "not within")],
)
def test_a_foreign_state_is_refused(change: dict[str, object], message: str) -> None:
    scale = dynamic()
    with pytest.raises(DocumentError, match=message):
        scale.load_state_dict(scale.state_dict() | change)


def test_a_state_with_a_missing_value_is_refused() -> None:
    with pytest.raises(DocumentError, match="'value' is missing"):
        dynamic().load_state_dict({"mode": "dynamic"})
