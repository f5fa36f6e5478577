"""Reading safetensors: exact values of any box, and every way in which a directory can be wrong is one clear error."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import rlmegatron.models.source as source_module
from rlmegatron.models.rules import Part
from rlmegatron.models.safetensors_writer import SafetensorsWriter, TensorSpec
from rlmegatron.models.source import SafetensorsDirectory

HEAD = torch.arange(10.0).view(5, 2)
FP8 = torch.float8_e4m3fn
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


def save(directory: Path, **files: dict[str, Tensor]) -> SafetensorsDirectory:
    """Files and their index."""
    for file, tensors in files.items():
        save_file(tensors, directory / f"{file}.safetensors")
    index = {name: f"{file}.safetensors" for file, tensors in files.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return SafetensorsDirectory(directory)


def parts(**shapes: tuple[int, ...]) -> list[Part]:
    return [Part(name, shape) for name, shape in shapes.items()]


@pytest.mark.parametrize("bytes_at_once", [1, 50, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_box_is_what_indexing_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bytes_at_once: int
) -> None:
    """Also where a narrow box is read a few rows at a time, of matrices, vectors and three dimensions."""
    monkeypatch.setattr(source_module, "_BYTES_AT_ONCE", bytes_at_once)
    tensors = {"vector": torch.randn(7).to(dtype), "matrix": torch.randn(6, 5).to(dtype)}
    tensors["cube"] = torch.randn(3, 4, 5).to(dtype)
    source, generator = save(tmp_path, model=tensors), random.Random(0)
    for name, tensor in tensors.items():
        for _ in range(30):
            box = tuple(tuple(sorted(generator.choices(range(size + 1), k=2))) for size in tensor.shape)
            found = source.read(name, box, tuple(tensor.shape))  # type: ignore[arg-type]
            assert found.dtype == dtype
            assert torch.equal(found, tensor[tuple(slice(*span) for span in box)])


def test_a_number_without_dimensions_is_read(tmp_path: Path) -> None:
    assert torch.equal(save(tmp_path, model={"a": torch.tensor(2.5)}).read("a", (), ()), torch.tensor(2.5))


def test_what_was_read_stays_when_the_file_goes(tmp_path: Path) -> None:
    source = save(tmp_path, model={"head": HEAD})
    found = source.read("head", ((0, 5), (0, 2)), (5, 2))
    source.release()
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(found, HEAD)


def test_release_closes_the_files_and_reading_goes_on(tmp_path: Path) -> None:
    files = {f"f{number}": {f"t{number}": torch.full((1,), float(number))} for number in range(40)}
    source, before = save(tmp_path, **files), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        for number in range(40):
            assert source.read(f"t{number}", ((0, 1),), (1,)).item() == number
        assert len(list(Path("/proc/self/fd").iterdir())) - before <= 16
    source.release()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_reading_a_large_file_leaves_nothing_in_memory(tmp_path: Path) -> None:
    """256 MB in tensors of 8: mapped pages of the file would count as this process's."""

    def resident_mb() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) >> 10

    specs = [TensorSpec(f"t{number}", (1024, 2048), torch.float32) for number in range(32)]
    SafetensorsWriter(tmp_path, specs).create()
    source = SafetensorsDirectory(tmp_path)
    before = resident_mb()
    for columns in (2048, 1024):
        for spec in specs:
            assert source.read(spec.name, ((0, 1024), (0, columns)), spec.shape).count_nonzero() == 0
    assert resident_mb() - before < 64


def fp8_weight(rows: int, columns: int, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """A random FP8 weight, its scales, and their product by a slow obvious loop."""
    weight = (torch.randn(rows, columns) * 100).to(FP8)
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.01
    product = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            product[row, column] = weight[row, column].float() * scales[row // block[0], column // block[1]]
    return weight, scales, product


@pytest.mark.parametrize(("rows", "columns", "block"), [(10, 9, (3, 4)), (8, 8, (4, 4)), (2, 3, (128, 128))])
def test_fp8_times_its_scales_is_exact_in_every_box(
    tmp_path: Path, rows: int, columns: int, block: tuple[int, int]
) -> None:
    weight, scales, product = fp8_weight(rows, columns, block)
    save(tmp_path, model={"w": weight, "w_scale_inv": scales})
    source, generator = SafetensorsDirectory(tmp_path, fp8_block=block), random.Random(0)
    assert torch.equal(source.read("w", ((0, rows), (0, columns)), (rows, columns)), product)
    for _ in range(50):
        top, bottom = sorted(generator.sample(range(rows + 1), 2))
        left, right = sorted(generator.sample(range(columns + 1), 2))
        found = source.read("w", ((top, bottom), (left, right)), (rows, columns))
        assert found.dtype == torch.float32
        assert torch.equal(found, product[top:bottom, left:right])
    assert source.expect(parts(w=(rows, columns)), ()) == []


def test_scales_of_another_type_are_widened_first(tmp_path: Path) -> None:
    weight, scales, _ = fp8_weight(4, 4, (2, 2))
    save(tmp_path, model={"w": weight, "w_scale_inv": scales.bfloat16()})
    found = SafetensorsDirectory(tmp_path, fp8_block=(2, 2)).read("w", ((0, 4), (0, 4)), (4, 4))
    wide = scales.bfloat16().float().repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert torch.equal(found, weight.float() * wide)


def test_fp8_without_its_block_or_scales_is_refused(tmp_path: Path) -> None:
    weight, scales, _ = fp8_weight(4, 4, (2, 2))
    unknown = save(tmp_path, model={"w": weight, "w_scale_inv": scales})
    whole = ((0, 4), (0, 4))
    with pytest.raises(ValueError, match=r"model.safetensors: w is of type F8_E4M3, which needs quantization_config"):
        unknown.read("w", whole, (4, 4))
    with pytest.raises(ValueError, match=r"w_scale_inv has shape \[2, 2\], config.json says \[1, 1\]"):
        SafetensorsDirectory(tmp_path, fp8_block=(4, 4)).read("w", whole, (4, 4))
    with pytest.raises(ValueError, match=r"w_scale_inv has shape \[2, 2\], config.json says \[1, 1\]"):
        SafetensorsDirectory(tmp_path, fp8_block=(4, 4)).expect(parts(w=(4, 4)), ())
    save(tmp_path, model={"w": weight})
    alone = SafetensorsDirectory(tmp_path, fp8_block=(2, 2))
    with pytest.raises(ValueError, match="the checkpoint has no tensor w_scale_inv"):
        alone.read("w", whole, (4, 4))
    with pytest.raises(ValueError, match="the checkpoint has no tensor w_scale_inv"):
        alone.expect(parts(w=(4, 4)), ())


def test_scales_of_a_weight_that_is_not_fp8_are_refused(tmp_path: Path) -> None:
    save(tmp_path, model={"w": torch.zeros(4, 4), "w_scale_inv": torch.ones(2, 2)})
    with pytest.raises(ValueError, match=r"does not have: w_scale_inv \(model.safetensors\)"):
        SafetensorsDirectory(tmp_path, fp8_block=(2, 2)).expect(parts(w=(4, 4)), ())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e5m2])
def test_another_type_than_weights_have_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    source = save(tmp_path, model={"head": HEAD.to(dtype)})
    with pytest.raises(ValueError, match=r"model.safetensors: head is of type \w+; supported: F32, BF16, F16, F8_E4M3"):
        source.read("head", ((0, 1), (0, 2)), (5, 2))
    with pytest.raises(ValueError, match="head is of type"):
        source.expect(parts(head=(5, 2)), ())


def test_a_directory_that_has_what_the_model_needs_is_accepted(tmp_path: Path) -> None:
    """A tensor may be needed twice, as tied embeddings are."""
    source = save(tmp_path, a={"head": HEAD}, b={"tail": HEAD[0]})
    assert source.expect([*parts(head=(5, 2), tail=(2,)), Part("head", (5, 2))], ()) == []
    assert source.names() == ["head", "tail"] and "tail" in source and "body" not in source


def test_all_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    spare = {f"spare.{number}": HEAD[0].clone() for number in range(7)}
    source = save(tmp_path, a={"head": HEAD, "tail": HEAD.clone()}, b=spare)
    with pytest.raises(ValueError) as caught:
        source.expect(parts(head=(6, 2), tail=(5, 3), body=(1,), legs=(2,)), ((r"spare\.[01]", "never used"),))
    assert str(caught.value).splitlines() == [
        f"{tmp_path}: the checkpoint has no tensor body, legs",
        f"{tmp_path}/a.safetensors: head has shape [5, 2], config.json says [6, 2]; "
        "tail has shape [5, 2], config.json says [5, 3]",
        f"{tmp_path}: tensors that this model does not have: "
        + ", ".join(f"spare.{number} (b.safetensors)" for number in range(2, 7)),
    ]


def test_long_lists_are_cut(tmp_path: Path) -> None:
    source = save(tmp_path, a={"head": HEAD})
    with pytest.raises(ValueError, match=r"no tensor t0, t1, t2, t3, t4, and 3 more$"):
        source.expect(parts(head=(5, 2), **{f"t{number}": (1,) for number in range(8)}), ())


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    names = ["model.layers.9.a", "model.layers.9.b", "model.layers.0.self_attn.rotary_emb.inv_freq", "x.bias"]
    source = save(tmp_path, a={"head": HEAD, **{name: HEAD[0].clone() for name in names}})
    dropped = ((r"model\.layers\.9\..+", "1 layer too many"), (r"x\..+", "no x"), (r"y", "no y"))
    assert source.expect(parts(head=(5, 2)), dropped) == [
        "left out 2 tensors: 1 layer too many",
        "left out 1 tensor: no x",
        "left out 1 tensor: rotary frequencies, which follow from config.json",
    ]


@pytest.mark.parametrize("bytes_at_once", [1, 1 << 24])
def test_a_copy_of_a_tensor_is_left_out_if_it_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_at_once: int
) -> None:
    monkeypatch.setattr(source_module, "_BYTES_AT_ONCE", bytes_at_once)
    need, copies = parts(embed=(5, 2)), {"head": "embed"}
    assert save(tmp_path, a={"embed": HEAD}).expect(need, (), copies=copies) == []
    source = save(tmp_path, a={"embed": HEAD, "head": HEAD.clone()})
    assert source.expect(need, (), copies=copies) == ["left out head: it equals embed"]
    with pytest.raises(ValueError, match="does not have: head"):
        source.expect(need, ())
    other = HEAD.clone()
    other[4, 1] += 1
    for different in (other, HEAD[:4].clone()):
        with pytest.raises(ValueError, match=r"a.safetensors: head differs from embed"):
            save(tmp_path, a={"embed": HEAD, "head": different}).expect(need, (), copies=copies)


def test_all_broken_files_are_named_at_once(tmp_path: Path) -> None:
    """One is missing, one truncated, one a Git LFS pointer, one lacks a tensor, and one is as it should be."""
    source = save(
        tmp_path, a={"a": HEAD}, b={"b": HEAD}, c={"c": HEAD}, d={"d": HEAD, "d2": HEAD.clone()}, e={"e": HEAD}
    )
    (tmp_path / "a.safetensors").unlink()
    whole = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(whole[:-1])
    (tmp_path / "c.safetensors").write_text(LFS)
    save_file({"d": HEAD}, tmp_path / "d.safetensors")
    with pytest.raises(ValueError) as caught:
        source.check()
    cannot = "cannot be read as safetensors"
    assert str(caught.value).splitlines() == [
        f"{tmp_path}/a.safetensors: {cannot}: No such file or directory",
        f"{tmp_path}/b.safetensors: {cannot}: it is truncated: it has {len(whole) - 1} bytes, its header describes "
        f"{len(whole)}",
        f"{tmp_path}/c.safetensors: {cannot}: it is a Git LFS pointer, not the file itself; "
        "fetch it with 'git lfs pull'",
        f"{tmp_path}/d.safetensors: does not hold what model.safetensors.index.json says: d2",
    ]
    with pytest.raises(ValueError, match="does not hold what model.safetensors.index.json says: d2"):
        source.read("d2", ((0, 1), (0, 2)), (5, 2))


@pytest.mark.parametrize("kept", [0, 6, 8, 40, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"head": HEAD}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model.safetensors: cannot be read as safetensors: it is truncated"):
        SafetensorsDirectory(tmp_path)


def entry(**changes: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


BROKEN_HEADERS = {
    "{": "Expecting property name",
    "\xff": "can't decode",
    "[" * 10000: "recursion",
    "[]": "its header is no JSON object",
    '{"a": 3}': "its header describes a as 3",
    json.dumps(entry(shape=[-2])): "its header describes a as",
    json.dumps(entry(shape=[True])): "its header describes a as",
    json.dumps(entry(shape=2)): "its header describes a as",
    json.dumps(entry(data_offsets=[8, 0])): "its header describes a as",
    json.dumps(entry(data_offsets=[0])): "its header describes a as",
    json.dumps(entry(shape=[3])): r"its header gives a 8 bytes, F32 \[3\] has 12",
    json.dumps(entry(data_offsets=[8, 16])): "leaves a gap before a",
    json.dumps({**entry(), "b": entry()["a"]}): "leaves a gap before b or lets it overlap",
    "{}": "it has 18 bytes, its header describes 10",
}


@pytest.mark.parametrize("header", BROKEN_HEADERS, ids=[str(number) for number in range(len(BROKEN_HEADERS))])
def test_a_broken_header_is_named(tmp_path: Path, header: str) -> None:
    text = header.encode("latin-1")
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(
        ValueError, match=f"model.safetensors: cannot be read as safetensors: .*{BROKEN_HEADERS[header]}"
    ):
        SafetensorsDirectory(tmp_path)


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04" + b"x" * 100)
    with pytest.raises(ValueError, match="model.safetensors: .*it does not begin with the length of a header"):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize("text", ['{"weight_map": ', "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', LFS])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model.safetensors.index.json: cannot be read as an index"):
        SafetensorsDirectory(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}: no model.safetensors and no model.safetensors.index.json"):
        SafetensorsDirectory(tmp_path)


def test_an_index_beside_a_file_that_it_does_not_know_is_refused(tmp_path: Path) -> None:
    """One of the two is left from another model, and nothing says which."""
    save(tmp_path, a={"a": HEAD})
    save_file({"a": HEAD}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{tmp_path}: model.safetensors.index.json does not name model.safetensors"):
        SafetensorsDirectory(tmp_path)
    assert save(tmp_path, model={"a": HEAD}).names() == ["a"]


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    source = save(tmp_path, model={"head": HEAD})
    source.check()
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(20)
    with pytest.raises(ValueError, match="model.safetensors: became shorter while it was read"):
        source.read("head", ((0, 5), (0, 2)), (5, 2))


def test_a_disk_that_fails_is_said_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    source = save(tmp_path, model={"head": HEAD})
    source.check()
    monkeypatch.setattr("os.preadv", fail)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}/model.safetensors'"):
        source.read("head", ((0, 5), (0, 2)), (5, 2))


def test_a_tensor_that_the_index_does_not_name_is_refused_unless_it_may_be_there(tmp_path: Path) -> None:
    source = save(tmp_path, a={"head": HEAD}, b={"tail": HEAD})
    names = ("tail", "hidden", "x.rotary_emb.inv_freq")
    save_file({name: HEAD.clone() for name in names}, tmp_path / "b.safetensors")
    needed = parts(head=(5, 2), tail=(5, 2))
    with pytest.raises(ValueError, match=r"tensors that this model does not have: hidden \(b.safetensors\)$"):
        source.expect(needed, [])
    assert SafetensorsDirectory(tmp_path).expect(needed, [("hidden", "a reason")]) == [
        "left out 1 tensor: a reason",
        "left out 1 tensor: rotary frequencies, which follow from config.json",
    ]
