"""Layouts, made-up weights, arithmetic, tables and the command line of the weight sync benchmark.

None of them measures anything: that the numbers are right for a real run is seen by running the tool.
"""

from __future__ import annotations

import io
import json
import os
import time
from itertools import pairwise
from math import prod

import bench_weight_sync
import pytest
import torch
import torch.distributed as dist
from bench.count_traffic import counting
from bench.kernel_speed import kernel_speed
from bench.measure import Spread
from bench.process_memory import PeakMemory, held_bytes
from bench.sync_layout import SyncLayout, parse_layout
from bench.sync_measure import Measured, times_faster, turns
from bench.sync_report import Report
from bench.synthetic_model import FAMILIES, TrainShard, architecture_for, content, num_elements
from rich.console import Console
from torch import Tensor

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.load import slices
from rlmegatron.models.rules import Part


def small(family: str, *, layer_multiple: int = 2) -> Architecture:
    return architecture_for(family, num_bytes=1e6, itemsize=4, layer_multiple=layer_multiple)


def whole(part: Part, *, seed: int = 0) -> Tensor:
    tensor = torch.empty(part.shape)
    content(part, tuple((0, size) for size in part.shape), seed=seed, out=tensor)
    return tensor


def test_a_layout_is_read_with_sizes_that_are_not_named_as_one() -> None:
    found = parse_layout("tp2pp2vpp2ep2->tp4ep2", num_ranks=None)
    assert (found.train.tp, found.train.pp, found.vpp, found.train.ep, found.train.etp) == (2, 2, 2, 2, 1)
    assert (found.engine_tensor, found.engine_expert, found.num_ranks) == (4, 2, 4)


@pytest.mark.parametrize(("text", "fewest"), [("tp8->tp2", 8), ("tp2->tp4", 4), ("ep4->tp2", 4), ("tp2pp2->tp1", 4)])
def test_the_fewest_ranks_hold_a_whole_learner_and_whole_engines(text: str, fewest: int) -> None:
    assert parse_layout(text, num_ranks=None).num_ranks == fewest


def test_ranks_follow_megatron_s_order_and_engines_the_strides_of_tensor_parallelism() -> None:
    found = parse_layout("tp2pp2->tp2", num_ranks=8)
    assert found.replicas == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert (found.place(6).pp_rank, found.place(6).tp_rank) == (1, 0)
    assert parse_layout("tp8->tp2", num_ranks=8).engines == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert parse_layout("tp8->tp2", num_ranks=8).engine_rank(6) == (2, 1)


@pytest.mark.parametrize(
    ("text", "num_ranks", "said"),
    [
        ("tp8", None, "write LEARNER->ENGINE"),
        ("tp8->", None, "no list of sizes"),
        ("tp8 pp2->tp2", None, "no list of sizes"),
        ("tp8cp2->tp2", None, "the learner has no cp; it has tp"),
        ("tp8->tp2pp2", None, "the engine has no pp; it has tp"),
        ("tp0->tp2", None, "tp0 must be at least 1"),
        ("tp2tp2->tp2", None, "names a size twice"),
        ("tp2vpp2->tp2", None, "needs pp above 1"),
        ("tp2->tp2ep4", None, "ep must divide tp"),
        ("tp4->tp2", 6, "use a multiple of 4"),
        ("tp1->tp4", 6, "cannot be shared out to engines of 4"),
    ],
)
def test_a_wrong_layout_says_what_is_wrong(text: str, num_ranks: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_layout(text, num_ranks=num_ranks)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gigabytes", [0.1, 1.0, 16.0])
def test_a_model_has_about_the_size_that_was_asked_for(family: str, gigabytes: float) -> None:
    arch = architecture_for(family, num_bytes=gigabytes * 1e9, itemsize=4, layer_multiple=2)
    assert num_elements(arch) * 4 == pytest.approx(gigabytes * 1e9, rel=0.2)
    assert arch.num_layers % 2 == 0 and arch.num_layers >= 4


def test_content_is_that_of_the_place_alone() -> None:
    """A box is what the whole tensor has there, and nothing repeats in a way that would hide a wrong place."""
    part = Part("model.layers.3.mlp.up_proj.weight", (300, 50))
    tensor, box = whole(part), torch.empty(40, 7)
    content(part, ((120, 160), (9, 16)), seed=0, out=box)
    assert torch.equal(box, tensor[120:160, 9:16])
    assert len(tensor.unique()) > 0.995 * tensor.numel()
    assert tensor.isfinite().all() and tensor.abs().max() <= 1 and tensor.std() == pytest.approx(3**-0.5, rel=0.02)
    assert not torch.equal(tensor, whole(part, seed=1))
    assert not torch.equal(tensor, whole(Part("model.layers.4.mlp.up_proj.weight", (300, 50))))


def test_content_of_large_tensors_is_made_in_steps_without_a_seam() -> None:
    part, rows = Part("lm_head.weight", (9000, 1024)), torch.empty(4, 1024)
    tensor = whole(part)
    for first in (0, 4094, 8191, 8996):
        content(part, ((first, first + 4), (0, 1024)), seed=0, out=rows)
        assert torch.equal(tensor[first : first + 4], rows)


LAYOUTS = ("tp2->tp1", "tp4pp2vpp2->tp2", "tp2ep4etp1->tp2", "tp1ep2etp2->tp2")


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("text", LAYOUTS)
def test_shards_are_slices_of_the_whole_tensors(family: str, text: str) -> None:
    """And every element of every tensor is on some rank of the first replica."""
    layout = parse_layout(text, num_ranks=None)
    arch = small(family, layer_multiple=layout.train.pp * layout.vpp)
    tensors = {part.name: whole(part) for rule in arch.parameter_rules(1) for part in rule.parts}
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in tensors.items()}
    for rank in layout.replicas[0]:
        shard = TrainShard(arch, layout, rank=rank, dtype=torch.float32)
        shard.fill(seed=0)
        for rule in shard.held:
            size, place = shard.cut(rule)
            for piece in rule.pieces(size=size, rank=place):
                held = shard.parameters[rule.parameter][slices(piece.target)]
                assert torch.equal(held, tensors[piece.name][slices(piece.source)]), (rank, piece)
                seen[piece.name][slices(piece.source)] = True
    assert all(mask.all() for mask in seen.values())


def test_parameters_of_one_type_share_a_buffer_and_what_keeps_fp32_has_its_own() -> None:
    layout = parse_layout("tp2->tp1", num_ranks=None)
    shard = TrainShard(small("deepseek_v3"), layout, rank=0, dtype=torch.bfloat16)
    assert [buffer.dtype for buffer in shard.buffers] == [torch.bfloat16, torch.float32]
    owners = {buffer.untyped_storage().data_ptr(): buffer for buffer in shard.buffers}
    spans = []
    for parameter in shard.parameters.values():
        assert parameter.is_contiguous() and parameter.storage_offset() % 64 == 0
        buffer = owners[parameter.untyped_storage().data_ptr()]
        spans.append((id(buffer), parameter.storage_offset(), parameter.numel()))
    for (owner, start, length), (next_owner, next_start, _) in pairwise(sorted(spans)):
        assert owner != next_owner or start + length <= next_start
    biases = [name for name, one in shard.parameters.items() if one.dtype == torch.float32]
    assert biases and all(name.endswith("router.expert_bias") for name in biases)


def test_new_weights_come_in_place() -> None:
    shard = TrainShard(small("qwen3"), parse_layout("tp1->tp1", num_ranks=1), rank=0, dtype=torch.float32)
    shard.fill(seed=0)
    before = {name: (one.data_ptr(), one.clone()) for name, one in shard.parameters.items()}
    shard.fill(seed=1)
    for name, parameter in shard.parameters.items():
        assert parameter.data_ptr() == before[name][0] and not torch.equal(parameter, before[name][1])


def test_sides_take_turns_forwards_and_backwards() -> None:
    assert ["".join(turns("abc", number)) for number in range(3)] == ["abc", "cba", "abc"]


def measured(name: str, *seconds: float, received: int = 0) -> Measured:
    return Measured(name, 9.0, [0, received], [1, 3], [10, 5_000_000], True, list(seconds))


def test_the_ratio_is_taken_round_by_round() -> None:
    """The second round is ten times slower for both; the ratio of the medians would be 5.5."""
    assert times_faster(measured("peer", 1.0, 10.0), measured("hf_stream", 10.0, 100.0)) == Spread(10.0, 10.0, 10.0)


def report(*sides: Measured) -> Report:
    facts = {"layout": "tp8->tp2", "ranks": 8, "family": "qwen3", "bytes": 1_000_000_000, "dtype": "fp32"}
    return Report(facts, sides, reference="hf_stream", bound=375_000_000, left_out={"megatron": "it is dense"})


def shown(table: object) -> str:
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def test_the_table_shows_of_ranks_the_one_with_most() -> None:
    found = report(measured("peer", 0.5, 0.5, received=375_000_000), measured("hf_stream", 5.0, 6.0))
    text = shown(found.table())
    for expected in ("0.500 (0.500 to 0.500)", "11.0x (10.5 to 11.5)", "375.0 MB", "1.00x", "5.0 MB", "9.000", "equal"):
        assert expected in text, expected
    assert found.lines() == ["megatron was left out: it is dense"]


def test_without_the_reference_there_is_no_ratio() -> None:
    found = report(measured("peer", 0.5))
    assert "10." not in shown(found.table())
    assert "times_faster" not in found.as_data()["transports"][0]


def test_the_file_holds_every_round_and_every_rank() -> None:
    found = report(measured("peer", 0.5, 1.5, received=750_000_000), measured("hf_stream", 5.0, 6.0))
    data = json.loads(json.dumps(found.as_data()))
    peer = data["transports"][0]
    assert (peer["rounds_s"], peer["first_call_s"], peer["messages"]) == ([0.5, 1.5], 9.0, [1, 3])
    assert (peer["bytes_received"], peer["received_over_bound"]) == ([0, 750_000_000], 2.0)
    assert peer["times_faster"] == {"median": 7.0, "low_quartile": 5.5, "high_quartile": 8.5}
    assert data["layout"] == "tp8->tp2" and data["left_out"] == {"megatron": "it is dense"}


def test_memory_that_comes_and_goes_meanwhile_is_seen() -> None:
    pids = [os.getpid()]
    before = held_bytes(pids)
    with PeakMemory(pids) as peak:
        block = torch.ones(16 << 20)
        deadline = time.monotonic() + 10
        while peak.bytes < before + (60 << 20) and time.monotonic() < deadline:
            time.sleep(0.01)
        del block
    assert 60 << 20 <= peak.bytes - before <= 100 << 20
    assert held_bytes(pids) - before < 20 << 20


def test_what_comes_through_torch_is_counted_and_what_is_on_this_rank_is_not(tmp_path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        own, wide = torch.ones(10), torch.ones(30)
        with counting() as traffic:
            dist.all_gather([torch.empty(10)], own)
            dist.broadcast(wide, src=0)
            dist.all_gather_object([None], "control")
        dist.broadcast(wide, src=0)
        assert (traffic.received, traffic.messages) == (0, 2)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_the_kernel_is_measured_on_the_bytes_of_an_engine_rank(family: str) -> None:
    layout: SyncLayout = parse_layout("tp4->tp2", num_ranks=None)
    arch = small(family)
    found = kernel_speed(
        arch, layout, train_dtype=torch.float32, engine_dtype=torch.bfloat16, device="cpu", num_rounds=2
    )
    cut = {rule.parameter: rule.dim is not None for rule in arch.parameter_rules(1)}
    expected = sum(
        prod(part.shape) * (4 if rule.keeps_fp32 else 2) // (2 if cut[rule.parameter] or rule.expert is not None else 1)
        for rule in arch.parameter_rules(1)
        for part in rule.parts
    )
    assert found.num_bytes == expected
    assert len(found.kernel) == len(found.plain) == 2 and min(found.kernel + found.plain) > 0


def test_the_command_line_chooses_ranks_types_and_transports(monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    given = bench_weight_sync.parse(["--layout", "tp4->tp2", "--transports", "hf_stream,peer", "--dtype", "bf16"])
    assert (given.ranks, given.transports, given.engine_dtype) == (4, ("hf_stream", "peer"), "bf16")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert bench_weight_sync.parse(["--layout", "tp4->tp2"]).layout.num_ranks == 8


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--layout", "tp8"], "write LEARNER->ENGINE"),
        (["--family", "gpt2"], "known are qwen3"),
        (["--layout", "tp2ep2->tp2"], "Qwen3ForCausalLM has no experts, so ep must be 1"),
        (["--layout", "tp2->tp2ep2"], "so the engine's ep must be 1"),
        (["--layout", "ep3->tp1", "--family", "mixtral"], "ep (3) does not divide 16 experts"),
        (["--layout", "tp7->tp1"], "cannot be cut over 7 ranks"),
        (["--gb", "0"], "--gb"),
        (["--gb", "nan"], "--gb"),
        (["--rounds", "0"], "--rounds"),
        (["--transports", "peer,peer"], "once at most"),
        (["--transports", "rdma"], "use each of peer"),
        (["--bucket-mb", "-1"], "--bucket-mb"),
        (["--dtype", "fp16"], "--dtype"),
        (["--json", "no/such/directory/x.json"], "there is no directory"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_wrong_option_is_a_mistake_of_the_command_line(wrong: list[str], said: str, capsys, monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as exit_:
        bench_weight_sync.parse(wrong)
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as exit_:
        bench_weight_sync.parse(wrong)
    assert exit_.value.code == 2 and not capsys.readouterr().err
