"""Leaving and coming back to the device, on CPU storages: what moves is the same there, only the copy is not pinned."""

from __future__ import annotations

import torch

from rlmegatron.learner.residency import HostCopy


def test_content_comes_back_bit_for_bit_under_every_view() -> None:
    whole = torch.randn(6, 4)
    view, parameter = whole[2:4], torch.nn.Parameter(whole[:, 1])
    before = whole.clone()
    copy = HostCopy([whole, view, parameter])
    copy.to_host()
    assert not copy.on_device
    assert whole.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0
    copy.to_device()
    assert copy.on_device
    assert torch.equal(whole, before) and torch.equal(view, before[2:4]) and torch.equal(parameter, before[:, 1])
    view.zero_()
    assert float(whole[2:4].abs().max()) == 0, "views still share their storage"


def test_nan_and_negative_zero_survive() -> None:
    tensor = torch.tensor([torch.nan, -0.0, torch.inf])
    bits = tensor.view(torch.int32).clone()
    copy = HostCopy([tensor])
    copy.to_host()
    copy.to_device()
    assert torch.equal(tensor.view(torch.int32), bits)


def test_dropped_content_comes_back_as_zeros() -> None:
    gradients = torch.randn(5, dtype=torch.bfloat16)
    copy = HostCopy([gradients], keep=False)
    copy.to_host()
    assert gradients.untyped_storage().nbytes() == 0
    copy.to_device()
    assert torch.equal(gradients, torch.zeros(5, dtype=torch.bfloat16))


def test_excluded_storages_stay() -> None:
    weights, state = torch.randn(3), torch.randn(3)
    copy = HostCopy([weights[1:], state], without=[weights])
    copy.to_host()
    assert weights.untyped_storage().nbytes() == 12 and state.untyped_storage().nbytes() == 0
    copy.to_device()


def test_moving_twice_does_nothing() -> None:
    tensor = torch.arange(3.0)
    copy = HostCopy([tensor])
    copy.to_device()
    copy.to_host()
    copy.to_host()
    copy.to_device()
    copy.to_device()
    assert tensor.tolist() == [0, 1, 2]
    tensor.add_(1)
    copy.to_host()
    copy.to_device()
    assert tensor.tolist() == [1, 2, 3], "the second time the newer content is saved"
