from __future__ import annotations

import torch

from mpbackend.train.data import DataWatch, weights_fingerprint


def watch(batches: list[object]) -> DataWatch:
    data = DataWatch()
    assert list(data.watch(batches)) == batches
    return data


def test_samples_are_rows_of_the_first_tensor_and_tokens_only_of_integers() -> None:
    assert watch([(torch.zeros(6, 8), torch.zeros(6))]).take() == (6, 0)
    assert watch([{"tokens": torch.zeros(4, 32, dtype=torch.long)}] * 2).take() == (8, 256)


def test_taking_starts_again() -> None:
    data = watch([torch.zeros(3, 2)])
    assert data.take() == (3, 0)
    assert data.take() == (0, 0)


def test_a_batch_without_tensors_passes() -> None:
    assert watch(["text", [], None]).take() == (0, 0)


def test_the_fingerprint_sees_values_order_formats_and_shapes() -> None:
    one, two = torch.arange(6.0), torch.arange(6.0) + 1
    prints = [
        watch(list(batches)).fingerprint
        for batches in ([one, two], [two, one], [one], [one, two.double()], [one.reshape(2, 3), two], [one, torch.cat([two[:-1], two[-1:] + 1e-6])])
    ]
    assert len(set(prints)) == len(prints)
    assert watch([one, two]).fingerprint == prints[0]
    assert watch([]).fingerprint == ""


def test_the_weights_fingerprint_sees_names_and_values() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    before = weights_fingerprint(model)
    assert weights_fingerprint(model) == before
    with torch.no_grad():
        model.bias[0] += 1
    assert weights_fingerprint(model) != before
    assert weights_fingerprint(torch.nn.Sequential(model)) != weights_fingerprint(model)
