"""What plans on emulated devices note."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mpbackend
from mpbackend.plugins import load_plugins

Select = Callable[[str], mpbackend.Target]


def noted(target: mpbackend.Target, recipe: str) -> str:
    return "\n".join(target.plan(recipe).notes)


@pytest.mark.parametrize(
    ("key", "recipe", "words"),
    [
        ("h100", "bf16", "forward, dgrad, wgrad, conv: bf16 is summed by steps of 16 products, aligned to 25 fraction bits, into fp32 with 23 fraction bits"),
        ("h100", "fp32", "one fused multiply-add after another in fp32"),
        ("h100", "fp32", "assumed: the sums go along K in order: libraries choose another"),
        ("h100", "fp8", "forward: fp8_e4m3 is summed by steps of 32 products, aligned to 13 fraction bits, into fp32 with 13 fraction bits, truncated (sm_90"),
        ("h100", "fp8", "dgrad, wgrad: fp8_e5m2 x fp8_e4m3 is summed by steps of 32 products"),
        ("h100", "fp8", "joined to an fp32 sum after every 128 products"),
        ("h100", "fp8-block", "each block of 128 along K is summed by itself"),
        ("b200", "mxfp8", "scales of blocks are applied inside the unit"),
        ("b200", "nvfp4", "groups of 16 added exactly"),
        ("ascend-910a", "fp16", "sets the status register"),
        ("ascend-910b3", "bf16", "the host's library in fp32, in an order of its own, from bf16 operands"),
        ("ascend-910b3", "bf16", "assumed: nominal fp32: no source states the width, the rounding or the order of the sums"),
        ("ascend-910b3", "bf16", "`mpbackend policy --diff ascend emu`"),
        ("h100", "bf16", "`mpbackend policy --diff cuda emu`"),
    ],
)
def test_what_is_noted(target_of: Select, key: str, recipe: str, words: str) -> None:
    assert words in noted(target_of(key), recipe)


def test_what_does_not_concern_a_plan_is_not_noted(target_of: Select) -> None:
    text = noted(target_of("h100"), "fp32")
    assert "autocast" not in text
    assert "scales" not in text
    assert "status register" not in text
    assert "nominal" not in text


def test_autocast_differs_where_the_note_says(target_of: Select) -> None:
    """The operators of the note, on the lists of the backends that it names."""
    backends = load_plugins().backends
    mine = backends["emu"].op_policy(target_of("h100").info)
    for peer in ("cuda", "ascend"):
        own = backends[peer].op_policy(target_of("h100").info)
        for name in ("lstm_cell", "gru_cell", "mv", "addmv"):
            assert (own[name], mine.get(name)) == ("lower", None), name
        for name in ("scatter_add", "index_put", "atan2", "cross"):
            assert (own[name], mine.get(name)) == ("promote", None), name
        assert (own["binary_cross_entropy"], mine["binary_cross_entropy"]) == ("banned", "fp32")
        lowered = {name for name, kind in mine.items() if kind == "lower"} & {
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
            "linear",
            "conv2d",
            "scaled_dot_product_attention",
        }
        assert all(own[name] == "lower" for name in lowered)
        assert {"mm", "addmm", "bmm", "baddbmm", "linear"} <= lowered
