from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from mpbackend.formats import FORMATS
from mpbackend.numerics.arithmetic import Arithmetic
from mpbackend.numerics.fingerprint import Tree
from mpbackend.numerics.matmul import mm
from mpbackend.numerics.probe_rows import Prober, Product
from mpbackend.numerics.probe_tree import chain, odd_sum, read_tree, reference
from mpbackend.numerics.rounding_rules import round_value

SHAPE = (16, 16, 48)


def random_tree(rng: random.Random, k: int, *, exact: bool = True) -> Tree:
    """Return a tree that joins two sums at random until one is left."""
    open_sums = list(range(k))
    nodes: list[tuple[int, ...]] = []
    while len(open_sums) > 1:
        chosen = rng.sample(open_sums, 2)
        open_sums = [index for index in open_sums if index not in chosen]
        open_sums.append(k + len(nodes))
        nodes.append(tuple(chosen))
    return Tree(k=k, nodes=tuple(nodes), exact=(exact,) * k)


def subtrees(tree: Tree) -> set[frozenset[int]]:
    """Return the leaves under every sum."""
    below = [frozenset([leaf]) for leaf in range(tree.k)]
    for children in tree.nodes:
        below.append(frozenset().union(*(below[child] for child in children)))
    return set(below[tree.k :])


def prober(product: Product, name: str = "fp32", output: str = "fp32") -> Prober:
    return Prober(product, name, name, output, 2000)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_is_read_back(seed: int) -> None:
    planted = random_tree(random.Random(seed), SHAPE[2])
    found = read_tree(prober(lambda a, b: reference(planted, a, b, "fp32")), SHAPE)
    assert found is not None, f"seed {seed}"
    assert subtrees(found) == subtrees(planted), f"seed {seed}"


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e5m2"])
def test_orders_are_read_through_narrow_operands(name: str) -> None:
    planted = random_tree(random.Random(11), 16)
    found = read_tree(prober(lambda a, b: reference(planted, a, b, "fp32"), name), (16, 16, 16))
    assert found is not None
    assert subtrees(found) == subtrees(planted)


def test_rounded_products_are_told_from_exact_ones() -> None:
    planted = random_tree(random.Random(3), SHAPE[2], exact=False)
    found = read_tree(prober(lambda a, b: reference(planted, a, b, "fp32")), SHAPE)
    assert found is not None
    assert not any(found.exact)
    fused = Arithmetic(a="fp32", b="fp32")
    chained = read_tree(prober(lambda a, b: mm(a.float(), b.float(), fused).double()), SHAPE)
    assert chained is not None
    # The first product has nothing to be fused with: it is rounded to the register.
    assert chained.exact == (False, *[True] * (SHAPE[2] - 1))
    assert chain(chained) == list(range(SHAPE[2]))


def test_a_step_of_several_products_is_one_sum() -> None:
    unit = Arithmetic(a="bf16", b="bf16", products_per_step=4, fraction_bits=25, register_rounding="rz")
    found = read_tree(prober(lambda a, b: mm(a.float(), b.float(), unit).double(), "bf16"), (16, 16, 16))
    assert found is not None
    assert found.nodes == ((0, 1, 2, 3), (16, 4, 5, 6, 7), (17, 8, 9, 10, 11), (18, 12, 13, 14, 15))
    assert chain(found) is None


def test_a_result_that_cannot_count_has_no_tree() -> None:
    unit = Arithmetic(a="fp16", b="fp16", output="fp8_e5m2")
    found = prober(lambda a, b: mm(a.float(), b.float(), unit).double(), "fp16", "fp8_e5m2")
    assert read_tree(found, (16, 16, 64)) is None
    assert found.calls == 0


def test_results_of_no_tree_are_not_forced_into_one() -> None:
    # Every element adds in another order, as kernels with edge tiles do.
    trees = [random_tree(random.Random(seed), 16) for seed in range(16)]

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack([reference(tree, a[i : i + 1], b, "fp32")[0] for i, tree in enumerate(trees)])

    found = read_tree(prober(product), (16, 16, 16))
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(16, 16, generator=generator).double()
    assert found is None or not torch.equal(reference(found, a, a, "fp32"), product(a, a))


def test_the_reference_equals_fractions() -> None:
    rng = random.Random(23)
    for seed in range(4):
        tree = random_tree(random.Random(seed), 12, exact=seed % 2 == 0)
        rows = [[rng.uniform(-1, 1) * 2.0 ** rng.randint(-20, 20) for _ in range(12)] for _ in range(8)]
        a = torch.tensor(rows).float().double()
        b = a.flip(0).mT.contiguous()
        found = reference(tree, a, b, "bf16")
        for i in range(8):
            for j in range(8):
                values = [Fraction(a[i, k].item()) * Fraction(b[k, j].item()) for k in range(12)]
                if not tree.exact[0]:
                    values = [Fraction(round_value(value, "fp32")) for value in values]
                for children in tree.nodes:
                    values.append(Fraction(round_value(sum((values[child] for child in children), Fraction(0)), "fp32")))
                assert found[i, j].item() == round_value(values[-1], "bf16"), f"tree {seed}, element {i}, {j}"


def test_sums_are_rounded_once() -> None:
    # 1 + 2^-24 + 2^-60 is above the tie between two numbers of fp32, but rounds to the tie in fp64.
    terms = [torch.tensor([1.0 + 2.0**-24], dtype=torch.float64), torch.tensor([2.0**-60], dtype=torch.float64)]
    assert (terms[0] + terms[1]).float().item() == 1
    assert odd_sum(terms).float().item() == 1 + 2.0**-23
    three = [torch.tensor([value], dtype=torch.float64) for value in (1.0, 2.0**-24, 2.0**-60)]
    assert odd_sum(three).float().item() == 1 + 2.0**-23
    below = [terms[0], -terms[1]]
    assert odd_sum(below).float().item() == 1


def test_a_flushing_reference_has_no_subnormal_numbers() -> None:
    tree = Tree(k=2, nodes=((0, 1),), exact=(True, True), flushed=True)
    tiny = FORMATS["fp32"].smallest_normal
    a = torch.tensor([[tiny / 2, 0.0], [tiny, -tiny]], dtype=torch.float64)
    b = torch.tensor([[2.0], [0.75]], dtype=torch.float64)
    assert reference(tree, a, b, "fp32").tolist() == [[0.0], [2 * tiny - 0.75 * tiny]]
    assert reference(tree, a, b * 0.125, "fp32").tolist() == [[0.0], [0.0]]
