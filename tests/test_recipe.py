"""The text form of a recipe: canonical, hashed, read back, and refused with the allowed values."""

from __future__ import annotations

import hashlib
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbackend.errors import DocumentError, MpbackendError, UnknownNameError
from mpbackend.formats import FORMATS
from mpbackend.recipe import (
    CHOICE_PATHS,
    DESCRIPTIONS,
    FORMAT_PATHS,
    PRESETS,
    STORED_FORMATS,
    STORED_PATHS,
    WORDS,
    Recipe,
    canonical_text,
    gemm,
    parse_recipe,
    recipe_hash,
    validate,
)
from mpbackend.roles import Granularity, LossScaling, TensorScaling

POWERS = {name: st.integers(*bounds) for name, bounds in {"init": (0, 24), "growth": (1, 40), "backoff": (-40, -1), "min": (-126, 0), "max": (24, 126)}.items()}
COUNTS = {
    "loss_scale.interval": (1, 2**31 - 1),
    "loss_scale.hysteresis": (1, 2**31 - 1),
    "loss_scale.patience": (1, 2**31 - 1),
    "scaling.history": (1, 2**31 - 1),
    "scaling.margin": (0, 15),
}


def values(path: str) -> st.SearchStrategy[Any]:
    """Return the values that a role takes."""
    if path in WORDS:
        return st.sampled_from(WORDS[path])
    if path in COUNTS:
        return st.integers(*COUNTS[path])
    if path in STORED_PATHS:
        return st.sampled_from([*STORED_FORMATS, *(["keep"] if path == "buffers" else [])])
    if path in CHOICE_PATHS:
        return st.lists(st.sampled_from([*FORMATS, "hf32"]), min_size=1, max_size=3, unique=True).map("|".join)
    if path in FORMAT_PATHS:
        return st.sampled_from([*FORMATS, *(["fast"] if path.startswith("accumulate.") else [])])
    if path == "scaling.keep":
        return st.lists(st.from_regex(r"[a-z][a-z0-9_.*]{0,5}", fullmatch=True), min_size=1, max_size=3).map("|".join)
    return POWERS[path.removeprefix("loss_scale.")].map(lambda exponent: 2.0**exponent)


PATHS = sorted(PRESETS["fp32"].flat())
OVERRIDES = st.lists(st.sampled_from(PATHS), unique=True).flatmap(lambda paths: st.fixed_dictionaries({path: values(path) for path in paths}))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_own_text(preset: str) -> None:
    assert canonical_text(PRESETS[preset]) == preset
    assert parse_recipe(preset) == PRESETS[preset]
    assert PRESETS[preset].preset == preset


def test_every_preset_is_described_and_no_other() -> None:
    assert list(DESCRIPTIONS) == list(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_passes_its_own_checks(preset: str) -> None:
    leaves = PRESETS[preset].flat()
    assert PRESETS[preset].evolve(**{path.replace(".", "__"): value for path, value in leaves.items()}) == PRESETS[preset]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(PRESETS)), OVERRIDES)
def test_the_canonical_text_reads_back(preset: str, overrides: dict[str, Any]) -> None:
    recipe = PRESETS[preset].evolve(**overrides)
    text = canonical_text(recipe)
    assert parse_recipe(text) == recipe
    assert canonical_text(parse_recipe(text)) == text
    assert {path: recipe.flat()[path] for path in overrides} == overrides


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(PRESETS)), OVERRIDES, st.randoms(use_true_random=False))
def test_the_order_of_assignments_does_not_matter(preset: str, overrides: dict[str, Any], random: Any) -> None:
    written = [f"{path}={value}" for path, value in overrides.items()]
    expected = recipe_hash(PRESETS[preset].evolve(**overrides))
    random.shuffle(written)
    assert recipe_hash(parse_recipe(f"{preset}:{','.join(written)}" if written else preset)) == expected


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("fp16:reduce.format=fp16,loss_scale.init=4096", "fp16:loss_scale.init=4096,reduce.format=fp16"),
        ("  fp16 : loss_scale.init = 4096 ", "fp16:loss_scale.init=4096"),
        ("fp16:loss_scale.init=65536", "fp16"),
        ("fp16:loss_scale.init=4.096e3", "fp16:loss_scale.init=4096"),
        ("fp16:loss_scale.min=0.5", "fp16:loss_scale.min=0.5"),
        ("fp16:loss_scale.interval=1e3", "fp16:loss_scale.interval=1000"),
        ("fp32:compute=half", "fp32:compute=fp16"),
        ("fp32:compute=torch.bfloat16", "fp32:compute=bf16"),
        ("fp32:params=Double", "fp32:params=fp64"),
        ("fp32:compute.forward=bf16,compute.dgrad=bf16,compute.wgrad=bf16", "fp32:compute=bf16"),
        ("fp32:compute.forward=bf16", "fp32:compute.forward=bf16"),
        ("fp8:compute.dgrad=fp8_e4m3", "fp8:compute.dgrad=fp8_e4m3"),
        ("fp8:compute.dgrad=e4m3,compute.wgrad=e4m3", "fp8:compute=fp8_e4m3"),
        ("fp8:accumulate.forward=fp32", "fp8:accumulate=fp32"),
        ("fp8:accumulate=fast", "fp8:accumulate=fast"),
        ("fp32:optimizer=bf16", "fp32:optimizer=bf16"),
        ("fp32:compute= tf32 | fp32 ", "fp32:compute=tf32|fp32"),
        ("fp32:compute=tf32|hf32|fp32", "fp32:compute=tf32|hf32|fp32"),
        ("fp32-fast:compute=fp32", "fp32-fast:compute=fp32"),
        ("fp32:buffers=bf16", "fp32:buffers=bf16"),
        ("fp32:compute.forward=fp16,compute=bf16", "fp32:compute.dgrad=bf16,compute.forward=fp16,compute.wgrad=bf16"),
        ("fp32:compute=bf16,compute.forward=fp16", "fp32:compute.dgrad=bf16,compute.forward=fp16,compute.wgrad=bf16"),
    ],
)
def test_texts_and_their_canonical_form(text: str, canonical: str) -> None:
    assert canonical_text(parse_recipe(text)) == canonical


def test_the_hash_is_of_the_canonical_text() -> None:
    recipe = parse_recipe("fp16:reduce.format=half,loss_scale.init=4096.0")
    assert recipe_hash(recipe) == hashlib.sha256(b"fp16:loss_scale.init=4096,reduce.format=fp16").hexdigest()[:16]
    assert recipe_hash(recipe) == recipe_hash(PRESETS["fp16"].evolve(loss_scale__init=4096, reduce__format="float16"))


def test_the_hash_of_a_preset_that_is_not_shipped_is_of_its_content_too() -> None:
    one, two = (Recipe(preset="mine", compute=gemm(name)) for name in ("bf16", "fp16"))
    assert canonical_text(one, {"mine": one}) == canonical_text(two, {"mine": two}) == "mine"
    assert recipe_hash(one, {"mine": one}) != recipe_hash(two, {"mine": two})
    assert recipe_hash(one, {"mine": one}) == recipe_hash(Recipe(preset="mine", compute=gemm("bf16")), {"mine": one})
    changed = one.evolve(grads="bf16")
    assert recipe_hash(changed, {"mine": one}) != recipe_hash(one, {"mine": one})


def test_the_hash_of_a_shipped_preset_is_of_its_text_whatever_else_is_installed() -> None:
    presets = {**PRESETS, "mine": Recipe(preset="mine")}
    for recipe in PRESETS.values():
        assert recipe_hash(recipe, presets) == recipe_hash(recipe) == hashlib.sha256(recipe.preset.encode()).hexdigest()[:16]
    replaced = {**PRESETS, "bf16": PRESETS["fp16"].evolve()}
    assert recipe_hash(PRESETS["bf16"], replaced) != recipe_hash(PRESETS["bf16"])


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"params": 3}, "params"),
        ({"params": "float8"}, "params"),
        ({"params": "int8"}, "params = 'int8'"),
        ({"compute": gemm("bfloat16")}, "compute.forward = 'bfloat16': write it bf16"),
        ({"compute": "bf16"}, "compute"),
        ({"accumulate": gemm("fast|fp32")}, "accumulate.forward"),
        ({"sensitive": "fp16"}, "sensitive"),
        ({"loss_scale": LossScaling(init=3.0)}, "loss_scale.init = 3.0"),
        ({"loss_scale": LossScaling(interval=True)}, "loss_scale.interval"),
        ({"scaling": TensorScaling(margin=99)}, "scaling.margin = 99"),
        ({"scaling": None}, "scaling"),
        ({"params": b"bf16"}, "params|another type"),
        ({"master": b"none"}, "master|another type"),
        ({"grads": object()}, "grads|unsupported"),
    ],
)
def test_a_recipe_that_was_built_by_hand_can_be_validated(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(MpbackendError, match=problem):
        validate(Recipe(preset="mine", **fields))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_shipped_preset_is_valid(preset: str) -> None:
    validate(PRESETS[preset])


def test_hashes_of_presets_differ() -> None:
    assert len({recipe_hash(recipe) for recipe in PRESETS.values()}) == len(PRESETS)


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, options in WORDS.items() for value in options])
def test_every_word_of_a_role_is_read(path: str, value: str) -> None:
    assert parse_recipe(f"fp32:{path}={value}").flat()[path] == value


def test_the_table_of_words_is_that_of_the_types() -> None:
    assert WORDS["scaling.inputs"] == WORDS["scaling.weights"] == get_args(Granularity)
    assert set(WORDS) | set(FORMAT_PATHS) | set(COUNTS) | {f"loss_scale.{name}" for name in POWERS} | {"scaling.keep"} == set(PATHS)


@pytest.mark.parametrize("path", WORDS)
def test_another_word_is_answered_with_the_allowed_ones(path: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_recipe(f"fp32:{path}=2x2")
    assert str(caught.value) == f"recipe field {path} = '2x2': not one of its values; allowed: {', '.join(WORDS[path])}"
    assert caught.value.allowed == WORDS[path]


@pytest.mark.parametrize("path", sorted(FORMAT_PATHS))
def test_an_unknown_format_is_answered_with_the_field_and_the_nearest(path: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown format for {path} 'bf61': .*nearest: bf16") as caught:
        parse_recipe(f"fp32:{path}=bf61")
    assert caught.value.name == "bf61"
    assert "bf16" in caught.value.allowed


def test_a_format_that_could_be_two_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="fp8 could mean several formats; name one of fp8_e4m3, fp8_e5m2"):
        parse_recipe("fp32:compute=fp8")


@pytest.mark.parametrize("path", sorted(STORED_PATHS))
@pytest.mark.parametrize("value", ["tf32", "hf32", "hf32_e8m11", "hif8", "e8m0", "ue4m3", "int8"])
def test_what_no_tensor_is_stored_in_is_refused_as_storage(path: str, value: str) -> None:
    with pytest.raises(DocumentError, match=f"recipe field {path} = '{value}': not a format that tensors are stored in; allowed: fp64, fp32, fp16, bf16"):
        parse_recipe(f"fp32:{path}={value}")


@pytest.mark.parametrize("path", sorted(FORMAT_PATHS - CHOICE_PATHS))
def test_only_compute_takes_an_ordered_choice(path: str) -> None:
    with pytest.raises(DocumentError, match=f"{path} = 'bf16.fp32': an ordered choice; only compute"):
        parse_recipe(f"fp32:{path}=bf16|fp32")


def test_an_ordered_choice_names_each_format_once() -> None:
    with pytest.raises(DocumentError, match="the same format twice"):
        parse_recipe("fp32:compute=half|fp16")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fp16:loss_scale.init=3", "loss_scale.init = 3.0: not a power of two"),
        ("fp16:loss_scale.init=0", "not a power of two"),
        ("fp16:loss_scale.init=-4", "not a power of two"),
        ("fp16:loss_scale.init=inf", "not a power of two"),
        ("fp16:loss_scale.init=nan", "not a power of two"),
        ("fp16:loss_scale.init=1e999", "not a power of two"),
        ("fp16:loss_scale.growth=1.5", "loss_scale.growth = 1.5: not a power of two"),
        ("fp16:loss_scale.growth=1", "not a power of two from 2 to 2^126"),
        ("fp16:loss_scale.growth=0.5", "not a power of two from 2 to 2^126"),
        ("fp16:loss_scale.backoff=1", "not a power of two from 2^-126 to 0.5"),
        ("fp16:loss_scale.backoff=0.3", "loss_scale.backoff = 0.3: not a power of two"),
        ("fp16:loss_scale.min=131072", "loss_scale.min <= init <= max does not hold"),
        ("fp16:loss_scale.max=32768", "loss_scale.min <= init <= max does not hold"),
        ("fp16:loss_scale.min=3", "loss_scale.min = 3.0: not a power of two"),
        ("fp16:loss_scale.max=3", "loss_scale.max = 3.0: not a power of two"),
        (f"fp16:loss_scale.max={2**127}", "not a power of two from 2^-126 to 2^126"),
        (f"fp16:loss_scale.min={2.0**-127!r}", "not a power of two from 2^-126 to 2^126"),
        ("fp16:loss_scale.interval=0", "not a whole number from 1 to 2^31 - 1"),
        ("fp16:loss_scale.interval=2147483648", "not a whole number from 1 to 2^31 - 1"),
        ("fp16:loss_scale.hysteresis=0", "not a whole number from 1 to 2^31 - 1"),
        ("fp16:loss_scale.hysteresis=2147483648", "not a whole number from 1 to 2^31 - 1"),
        ("fp8:scaling.history=0", "not a whole number from 1 to 2^31 - 1"),
        ("fp8:scaling.history=2147483648", "not a whole number from 1 to 2^31 - 1"),
        ("fp8:scaling.keep=a b", "not name patterns joined by |"),
        ("fp8:scaling.keep=a||b", "not name patterns joined by |"),
        ("fp8:scaling.margin=-1", "not a whole number from 0 to 15"),
        ("fp8:scaling.margin=16", "not a whole number from 0 to 15"),
        ("fp16:loss_scale.interval=1.5", "loss_scale.interval = '1.5': not a number that fits; allowed: a whole number"),
        ("fp16:loss_scale.interval=nan", "allowed: a whole number"),
        ("fp16:loss_scale.interval=1e400", "allowed: a whole number"),
        ("fp16:loss_scale.init=big", "loss_scale.init = 'big': not a number that fits; allowed: a number"),
        ("fp16:", "'' is not path=value"),
        ("fp16:,", "'' is not path=value"),
        ("fp16:loss_scale.init", "'loss_scale.init' is not path=value"),
        ("fp16:=3", "'=3' is not path=value"),
        ("fp16:loss_scale.init=", "'loss_scale.init=' is not path=value"),
        ("fp16:loss_scale.init=4,loss_scale.init=8", "'loss_scale.init' is given twice"),
    ],
)
def test_a_value_out_of_range_is_refused(text: str, problem: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_recipe(text)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "fp16:loss_scale.interval=1,loss_scale.hysteresis=2147483647",
        f"fp16:loss_scale.max={2**126},loss_scale.min={2.0**-126!r}",
        "fp16:loss_scale.init=1,loss_scale.min=1,loss_scale.max=1",
        "fp8:scaling.margin=15,scaling.history=1",
    ],
)
def test_the_ends_of_the_ranges_are_taken(text: str) -> None:
    assert parse_recipe(text) != parse_recipe(text.partition(":")[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf61", r"unknown preset 'bf61': .*nearest: bf16"),
        ("fp16-mater", "nearest: fp16-master"),
        ("", r"unknown preset '': .*allowed: bf16"),
        ("fp16:los_scale.init=4", "unknown role 'los_scale.init': .*nearest: loss_scale.init"),
        ("fp16:loss_scale=4", "nearest: loss_scale"),
        ("fp16:compute.backward=fp16", "nearest: compute.forward"),
        ("fp16:preset=bf16", "unknown role 'preset'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(text: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        parse_recipe(text)


@pytest.mark.parametrize("value", [None, True, [65536.0], "x", 10**400])
def test_evolve_refuses_a_value_of_another_type(value: Any) -> None:
    with pytest.raises(DocumentError, match=r"loss_scale\.init"):
        PRESETS["fp16"].evolve(loss_scale__init=value)


def test_evolve_takes_dtype_objects() -> None:
    numpy = pytest.importorskip("numpy", reason="a development dependency")
    assert PRESETS["fp32"].evolve(compute=numpy.dtype("float16"), params=numpy.float64) == parse_recipe("fp32:compute=fp16,params=fp64")


def test_a_preset_of_a_plugin_is_the_base_of_its_text() -> None:
    mine = Recipe(preset="mine", params="bf16")
    known = {**PRESETS, "mine": mine}
    changed = parse_recipe("mine:reduce.format=bf16", known)
    assert changed.params == "bf16"
    assert canonical_text(changed, known) == "mine:reduce.format=bf16"
    assert canonical_text(mine) == "mine:params=bf16", "without the plugin the text still says all"


def test_presets_say_what_their_names_promise() -> None:
    low = {"bf16", "fp16"}
    for name, recipe in PRESETS.items():
        dynamic = recipe.loss_scale.mode == "dynamic"
        assert dynamic == name.startswith("fp16"), name
        assert (recipe.params in low) == name.endswith(("-master", "-params", "-kahan", "-sr")), name
        assert (recipe.master == "fp32") == name.endswith("-master"), name
        assert (recipe.scaling.mode != "none") == (FORMATS.get(recipe.compute.forward, FORMATS["fp32"]).bits <= 8), name
    assert PRESETS["fp32-fast"].compute.forward == "tf32|hf32|fp32"
    assert (PRESETS["fp8"].compute.forward, PRESETS["fp8"].compute.dgrad) == ("fp8_e4m3", "fp8_e5m2")
    assert PRESETS["fp8-delayed"].scaling.mode == "delayed"
