"""The core never names a vendor: not in an identifier, not in a string that the program uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

import pytest

WORDS = frozenset(["cuda", "cudnn", "cublas", "nccl", "npu", "cann", "hccl", "ascend", "nvidia", "hopper"])
COMPOUND = re.compile(r"private_?use_?1", re.IGNORECASE)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of every identifier and string; strings that stand alone as a statement are documentation and are left out."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    line = 1
    for node in ast.walk(tree):
        line = getattr(node, "lineno", line)
        if id(node) in documentation:
            continue
        for _, value in ast.iter_fields(node):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, (str, bytes)):
                    yield line, item if isinstance(item, str) else item.decode("latin-1")


def vendor_words(sources: Mapping[str, str]) -> list[str]:
    """Return ``module:line: word`` for every vendor's word in the sources."""
    found: list[str] = []
    for module, source in sources.items():
        for line, text in texts(ast.parse(source)):
            words = [word for word in WORD.findall(text) if word.lower() in WORDS] + COMPOUND.findall(text)
            found += [f"{module}:{line}: {word}" for word in words]
    return found


def test_core_names_no_vendor(core: Mapping[str, str]) -> None:
    assert len(core) > 10
    assert vendor_words(core) == []


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("torch.cuda.empty_cache()", "cuda"),
        ("import torch.backends.cudnn", "cudnn"),
        ("from torch.cuda import amp", "cuda"),
        ("class CannBackend: ...", "Cann"),
        ("def is_NPU(): ...", "NPU"),
        ("def f(ascend_index=0): ...", "ascend"),
        ("f(use_hccl=True)", "hccl"),
        ("x = 'a\\ncuda:0'", "cuda"),
        ("x = f'{y} NVIDIA H100'", "NVIDIA"),
        ("x = b'Ascend910B2'", "Ascend"),
        ("key = 'AutocastPrivateUse1'", "PrivateUse1"),
        ("key = 'private_use_1'", "private_use_1"),
        ("x.matmulNCCLReduce()", "NCCL"),
        ("def f():\n    global hopper", "hopper"),
        ("from __future__ import annotations\nx: cublas.Handle", "cublas"),
    ],
)
def test_planted_vendor_word_is_found(source: str, word: str) -> None:
    found = vendor_words({"planted": source})
    assert [entry.rsplit(" ", 1)[1] for entry in found] == [word]


@pytest.mark.parametrize(
    "source",
    [
        '"""Like cuda."""',
        "x = 1  # as cuda does",
        'def f():\n    """Not npu."""',
        'X = 1\n"""A constant that Ascend uses."""',
        "cannot = ascending = scanned = barracuda = 'inputs, canned'",
    ],
)
def test_documentation_and_longer_words_are_left_out(source: str) -> None:
    assert vendor_words({"planted": source}) == []
