from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpbackend.errors import DocumentError
from mpbackend.roles import LossScaling
from mpbackend.train.device_scale import DeviceScale
from mpbackend.train.loss_scale import LossScale

SETTINGS = st.builds(
    lambda low, init, high, interval, hysteresis, growth, backoff: LossScaling(
        mode="dynamic",
        min=2.0**low,
        init=2.0 ** (low + init),
        max=2.0 ** (low + init + high),
        interval=interval,
        hysteresis=hysteresis,
        growth=2.0**growth,
        backoff=2.0**-backoff,
    ),
    st.integers(-126, 100),
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
)


@given(SETTINGS, st.lists(st.sampled_from([(False, False), (True, False), (True, True)]), max_size=30))
def test_the_machine_on_the_device_is_the_machine_on_the_host(settings: LossScaling, verdicts: list[tuple[bool, bool]]) -> None:
    host = LossScale(settings)
    device = DeviceScale(LossScale(settings), torch.device("cpu"))
    for found, helpless in verdicts:
        host.update(overflowed=found, helpless=helpless)
        device.update(torch.tensor(found), torch.tensor(helpless))
        assert device.state_dict() == host.state_dict()
    assert (device.value, device.skips, device.streak_tensor.item()) == (host.value, host.skips, host.streak)


def test_a_state_goes_from_one_to_the_other_and_back() -> None:
    settings = LossScaling(mode="dynamic")
    host = LossScale(settings)
    for found in (True, True, False, True):
        host.update(overflowed=found)
    assert (host.startup_skips, host.skips, host.streak) == (2, 1, 1)
    device = DeviceScale(LossScale(settings), torch.device("cpu"))
    device.load_state_dict(host.state_dict())
    again = LossScale(settings)
    again.load_state_dict(device.state_dict())
    assert again.state_dict() == host.state_dict()
    with pytest.raises(DocumentError, match="power of two"):
        device.load_state_dict({**host.state_dict(), "value": 3.0})
    with pytest.raises(AttributeError):
        _ = device.nothing


@pytest.mark.parametrize(("helpless", "minimum", "streak"), [(False, 1.0, 0), (True, 1.0, 3), (False, 65536.0, 3)])
def test_the_search_for_a_first_scale_counts_only_what_no_scale_cures(helpless: bool, minimum: float, streak: int) -> None:
    scale = LossScale(LossScaling(mode="dynamic", min=minimum))
    for _ in range(3):
        scale.update(overflowed=True, helpless=helpless)
    assert (scale.streak, scale.startup_skips, scale.skips) == (streak, 3, 0)
    scale.update(overflowed=False)
    scale.update(overflowed=True)
    assert (scale.streak, scale.startup_skips, scale.skips) == (1, 3, 1)
