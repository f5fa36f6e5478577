"""Payloads are opened by other processes, which see the tensors of their rank."""

import base64
import io
import pickle
import subprocess
import sys

import pytest
import torch

from rlmegatron.rollout.tensor_payload import NamedValue, handle_of, pack_for_ranks

OPEN = (
    "import base64, pickle, sys, torch, torch.multiprocessing\n"
    "for name, tensor in pickle.loads(base64.b64decode(sys.stdin.read())):\n"
    "    print(name, tensor.dtype, tuple(tensor.shape), tensor.double().flatten().tolist())\n"
)


def opened_elsewhere(payload: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", OPEN], input=payload, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_another_process_opens_every_shape_and_type() -> None:
    values = [
        ("a", torch.arange(6, dtype=torch.float32).view(2, 3).t()),
        ("b", torch.tensor(1.5, dtype=torch.bfloat16)),
        ("c", torch.arange(3, dtype=torch.int64)),
        ("d", torch.nn.Parameter(torch.ones(1))),
    ]
    (payload,) = pack_for_ranks(values, num_ranks=1)
    assert opened_elsewhere(payload) == [
        "a torch.float32 (3, 2) [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]",
        "b torch.bfloat16 () [1.5]",
        "c torch.int64 (3,) [0.0, 1.0, 2.0]",
        "d torch.float32 (1,) [1.0]",
    ]


def test_each_rank_gets_its_own_payload_and_the_common_ones() -> None:
    values: list[NamedValue] = [("own", [torch.tensor([1.0]), torch.tensor([2.0])]), ("common", torch.tensor([3.0]))]
    first, second = pack_for_ranks(values, num_ranks=2)
    assert opened_elsewhere(first) == ["own torch.float32 (1,) [1.0]", "common torch.float32 (1,) [3.0]"]
    assert opened_elsewhere(second) == ["own torch.float32 (1,) [2.0]", "common torch.float32 (1,) [3.0]"]


def test_a_handle_made_in_another_process_is_passed_on() -> None:
    program = (
        "import base64, sys, torch\n"
        "from rlmegatron.rollout.tensor_payload import handle_of\n"
        "tensor = torch.tensor([7.0, 8.0])\n"
        "print(base64.b64encode(handle_of(tensor)).decode(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert maker.stdout is not None
    handle = base64.b64decode(maker.stdout.readline())
    first, second = pack_for_ranks([("x", [handle, torch.tensor([9.0])])], num_ranks=2)
    assert opened_elsewhere(first) == ["x torch.float32 (2,) [7.0, 8.0]"]
    assert opened_elsewhere(second) == ["x torch.float32 (1,) [9.0]"]
    assert maker.stdin is not None
    maker.stdin.close()
    maker.wait()


def test_a_payload_holds_a_handle_and_not_the_data() -> None:
    (payload,) = pack_for_ranks([("big", torch.zeros(1_000_000))], num_ranks=1)
    assert len(payload) < 2000


def test_shared_memory_is_passed_without_a_copy() -> None:
    tensor = torch.zeros(4).share_memory_()
    handle = handle_of(tensor)
    tensor.fill_(5.0)
    assert pickle.load(io.BytesIO(handle)).tolist() == [5.0] * 4


def test_the_sharing_strategy_of_the_process_is_left_alone() -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    base64.b64decode(pack_for_ranks([("x", torch.zeros(2))], num_ranks=1)[0])
    assert torch.multiprocessing.get_sharing_strategy() == before


def test_a_wrong_number_of_payloads_is_named() -> None:
    with pytest.raises(ValueError, match="qkv: 3 payloads for an engine of 2 ranks"):
        pack_for_ranks([("qkv", [torch.zeros(1)] * 3)], num_ranks=2)
