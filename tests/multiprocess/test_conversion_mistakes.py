"""What is wrong with a source is said once, with the file's name, before anything is written.

What this does not prove: that every fault of a file is found; values are taken as they are.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from conversions import differing, to_hf, to_mcore, weights
from family_models import write_variant
from ranks import run_ranks
from safetensors.torch import load_file, save_file


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def two_shards(directory: Path) -> None:
    """As a large model is stored."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def missing_shard(directory: Path) -> None:
    two_shards(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()


def absent_tensor(directory: Path) -> None:
    two_shards(directory)
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["model.norm.weight"] = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors"}.get(
        weight_map["model.norm.weight"], "model-00001-of-00002.safetensors"
    )
    index.write_text(json.dumps({"weight_map": weight_map}))


def truncated(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", os.path.getsize(directory / "model.safetensors") - 1)


def wrong_shape(directory: Path) -> None:
    edit_tensors(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))


def extra_tensor(directory: Path) -> None:
    edit_tensors(directory, lambda tensors: tensors.update({"model.layers.0.lora_A.weight": torch.ones(3)}))


def unknown_architecture(directory: Path) -> None:
    edit_json(directory / "config.json", architectures=["GemmaForCausalLM"])


def unsupported_quantisation(directory: Path) -> None:
    edit_json(directory / "config.json", quantization_config={"quant_method": "awq", "bits": 4})


def unknown_key(directory: Path) -> None:
    edit_json(directory / "config.json", logit_softcapping=30.0)


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


MISTAKES_IN_HF: dict[Callable[[Path], None], str] = {
    missing_shard: "model-00002-of-00002.safetensors: cannot be read as safetensors: No such file",
    absent_tensor: ".safetensors: does not hold what model.safetensors.index.json says: model.norm.weight",
    truncated: "model.safetensors: cannot be read as safetensors: it is truncated",
    wrong_shape: "model.safetensors: model.norm.weight has shape [31], config.json says [32]",
    extra_tensor: "tensors that this model does not have: model.layers.0.lora_A.weight (model.safetensors)",
    unknown_architecture: "config.json: architecture GemmaForCausalLM is not supported",
    unsupported_quantisation: "config.json: quantization_config of method 'awq' is not supported",
    unknown_key: "config.json: not understood: logit_softcapping = 30.0",
    no_config: "config.json does not exist",
    no_weights: "no model.safetensors and no model.safetensors.index.json",
}


def spoiled_sources(directory: Path) -> dict[str, tuple[str, list[str]]]:
    """Mistake -> (what is said, which outputs are there)."""
    write_variant(directory / "good", "llama")
    return spoil_each(directory, MISTAKES_IN_HF, to_mcore)


def spoil_each(
    directory: Path, mistakes: Iterable[Callable[[Path], None]], convert: Callable[[Path, Path], str]
) -> dict[str, tuple[str, list[str]]]:
    """Make every mistake in a copy of `directory`/good, and convert that."""
    found = {}
    for spoil in mistakes:
        bad = shutil.copytree(directory / "good", directory / spoil.__name__)
        spoil(bad)
        out = directory / f"{spoil.__name__}-out"
        found[spoil.__name__] = (convert(bad, out), sorted(path.name for path in directory.glob(f"{out.name}*")))
    return found


def assert_each_is_named(
    found: dict[str, tuple[str, list[str]]], mistakes: dict[Callable[[Path], None], str], directory: Path
) -> None:
    for spoil, expected in mistakes.items():
        said, outputs = found[spoil.__name__]
        assert said.startswith(f"FAILED {directory}/{spoil.__name__}"), said
        assert expected in said, said
        assert "Traceback" not in said
        assert outputs == []


def test_a_mistake_in_a_hugging_face_directory_is_named(tmp_path: Path) -> None:
    (found,) = run_ranks(spoiled_sources, 1, tmp_path)
    assert_each_is_named(found, MISTAKES_IN_HF, tmp_path)


def no_metadata(directory: Path) -> None:
    (directory / ".metadata").unlink()


def no_metadata_json(directory: Path) -> None:
    (directory / "metadata.json").unlink()


def truncated_data(directory: Path) -> None:
    os.truncate(directory / "__2_0.distcp", os.path.getsize(directory / "__2_0.distcp") - 1)


def missing_data(directory: Path) -> None:
    (directory / "__2_0.distcp").unlink()


def truncated_metadata(directory: Path) -> None:
    os.truncate(directory / ".metadata", 1000)


class _RunsCode:
    def __reduce__(self) -> Any:
        return (os.system, ("touch it_has_run",))


def metadata_with_code(directory: Path) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(_RunsCode()))


def more_layers(directory: Path) -> None:
    edit_json(directory / "config.json", num_hidden_layers=5)


def fewer_layers(directory: Path) -> None:
    edit_json(directory / "config.json", num_hidden_layers=3)


def larger_vocabulary(directory: Path) -> None:
    """Padded, the checkpoint has 40 rows."""
    edit_json(directory / "config.json", vocab_size=41)


def other_experts(directory: Path) -> None:
    edit_json(directory / "config.json", n_routed_experts=16)


def broken_archive(directory: Path) -> None:
    path = directory / "__2_0.distcp"
    path.write_bytes(b"\0" * len(path.read_bytes()))


MISTAKES_IN_MEGATRON: dict[Callable[[Path], None], str] = {
    no_metadata: "/.metadata does not exist: ",
    no_metadata_json: "/metadata.json does not exist: ",
    truncated_data: "/__2_0.distcp is truncated: it has ",
    missing_data: "/__2_0.distcp is missing, though .metadata names it",
    truncated_metadata: "/.metadata: cannot be read as checkpoint metadata: ",
    metadata_with_code: "/.metadata: cannot be read as checkpoint metadata: it names posix.system, which no checkpoint",
    no_config: " has no config.json; give --hf-config a directory that belongs to the model",
    unknown_key: "/config.json: not understood: logit_softcapping = 30.0",
    more_layers: ": has no tensor decoder.layers.4.",
    fewer_layers: ": holds what the model of config.json has not: decoder.layers.3.",
    larger_vocabulary: ": embedding.word_embeddings.weight has shape [40, 32], config.json says [48, 32]",
    other_experts: "decoder.layers.1.mlp.router.weight has shape [8, 32], config.json says [16, 32]",
}


def spoiled_checkpoints(directory: Path) -> dict[str, tuple[str, list[str]]]:
    write_variant(directory / "hf", "deepseek-v3")
    os.chdir(directory)
    said = to_mcore(directory / "hf", directory / "good")
    assert "FAILED" not in said, said
    return spoil_each(directory, [*MISTAKES_IN_MEGATRON, broken_archive], to_hf)


def test_a_mistake_in_a_megatron_checkpoint_is_named(tmp_path: Path) -> None:
    (found,) = run_ranks(spoiled_checkpoints, 1, tmp_path)
    assert_each_is_named(found, MISTAKES_IN_MEGATRON, tmp_path)
    said, outputs = found["broken_archive"]
    assert f"{tmp_path}/broken_archive/__2_0.distcp: holds no tensor at byte " in said
    assert "Traceback" not in said
    assert outputs == ["broken_archive-out.partial"]
    assert not (tmp_path / "it_has_run").exists()


def mixed_up(directory: Path) -> dict[str, str]:
    """The two kinds of directory given for each other, a run's step for its actor, and a checkpoint of another type."""
    hf, mcore = directory / "hf", directory / "step" / "actor"
    write_variant(hf, "llama")
    found = {"in": to_mcore(hf, mcore)}
    found["mcore as hf"] = to_mcore(mcore, directory / "out")
    found["hf as mcore"] = to_hf(hf, directory / "out")
    found["step"] = to_hf(directory / "step", directory / "out", hf_config=hf)
    found["nothing"] = to_hf(directory / "absent", directory / "out", hf_config=hf)
    found["both"] = to_mcore(hf, hf)
    found["inside"] = to_mcore(hf, hf / "inside")
    os.chdir(hf)
    found["relative"] = to_mcore(Path(), Path("relative/"))
    os.symlink(hf, directory / "link")
    found["link"] = to_mcore(directory / "link", directory / "linked")
    os.symlink(directory / "absent", hf / "dangling.json")
    found["dangling"] = to_mcore(hf, directory / "dangling")
    os.unlink(hf / "dangling.json")
    found["dangling mended"] = to_mcore(hf, directory / "dangling")
    return found


def test_directories_that_are_mixed_up_are_told_apart(tmp_path: Path) -> None:
    (found,) = run_ranks(mixed_up, 1, tmp_path)
    hf = tmp_path / "hf"
    actor = tmp_path / "step/actor"
    assert found["mcore as hf"] == (
        f"FAILED {actor} is a Megatron checkpoint; --hf takes a Hugging Face directory with safetensors"
    )
    assert found["hf as mcore"] == f"FAILED {hf} is no Megatron checkpoint: it has no .metadata"
    assert found["step"] == (
        f"FAILED {tmp_path}/step is no Megatron checkpoint: it has no .metadata; did you mean {actor}?"
    )
    assert found["nothing"] == f"FAILED {tmp_path}/absent does not exist"
    assert found["both"] == f"FAILED {hf} exists already; delete it or give another --out"
    assert "dangling.json" in found["dangling"]
    for case in ("in", "inside", "relative", "link", "dangling mended"):
        assert "FAILED" not in found[case], found[case]
    assert (hf / "relative/.metadata").is_file()
    assert (hf / "inside/.metadata").is_file()
    assert sorted(os.listdir(hf / "inside")) == sorted(os.listdir(actor))


def mixed_types(directory: Path) -> dict[str, Any]:
    """fp32 -> bf16 -> fp32, and fp32 -> fp32 -> bf16; what differs from the casts of the source."""
    hf = directory / "hf"
    write_variant(hf, "qwen2-tied")
    said = [
        to_mcore(hf, directory / "bf16", dtype="bf16"),
        to_mcore(hf, directory / "fp32", dtype="fp32"),
        to_hf(directory / "bf16", directory / "bf16-fp32", dtype="fp32"),
        to_hf(directory / "fp32", directory / "fp32-bf16", dtype="bf16"),
    ]
    assert not any("FAILED" in text for text in said), said
    expected = {name: tensor.bfloat16() for name, tensor in weights(hf).items()}
    return {
        "bf16-fp32": differing(weights(directory / "bf16-fp32"), {n: t.float() for n, t in expected.items()}),
        "fp32-bf16": differing(weights(directory / "fp32-bf16"), expected),
        "types": [
            json.loads((directory / name / "config.json").read_text())["dtype"]
            for name in ("bf16", "fp32", "bf16-fp32", "fp32-bf16")
        ],
    }


def test_types_may_change_on_either_way(tmp_path: Path) -> None:
    (found,) = run_ranks(mixed_types, 1, tmp_path)
    assert found["bf16-fp32"] == found["fp32-bf16"] == []
    assert found["types"] == ["bfloat16", "float32", "float32", "bfloat16"]


def of_fp8(directory: Path) -> dict[str, Any]:
    """DeepSeek-V3 as it is published: FP8 weights in blocks with scales, and a layer that predicts more tokens."""
    hf, block = directory / "hf", 16
    write_variant(hf, "deepseek-v3")
    generator = torch.Generator().manual_seed(1)
    stored, expected = {}, {}
    for name, tensor in load_file(hf / "model.safetensors").items():
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            stored[name] = expected[name] = tensor
            continue
        shape = [-(-size // block) for size in tensor.shape]
        scales = torch.rand(shape, generator=generator) + 0.01
        stored[name], stored[f"{name}_scale_inv"] = (tensor * 300).to(torch.float8_e4m3fn), scales
        expected[name] = stored[name].float()
        for row in range(tensor.shape[0]):
            for column in range(0, tensor.shape[1], block):
                expected[name][row, column : column + block] *= scales[row // block, column // block]
    stored |= {
        f"model.layers.4.{name}": torch.ones(4)
        for name in ("enorm.weight", "eh_proj.weight", "shared_head.norm.weight")
    }
    save_file(stored, hf / "model.safetensors")
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    edit_json(
        hf / "config.json",
        num_nextn_predict_layers=1,
        quantization_config={**quantization, "weight_block_size": [block, block]},
    )
    said = to_mcore(hf, directory / "mcore", verify=True)
    back = to_hf(directory / "mcore", directory / "back")
    from_source = to_hf(directory / "mcore", directory / "back2", hf_config=hf)
    return {
        "said": said,
        "back": [back, from_source],
        "lost": differing(weights(directory / "back"), expected),
        "quantised": sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()),
        "configs": [json.loads((directory / out / "config.json").read_text()) for out in ("mcore", "back", "back2")],
    }


def test_fp8_blocks_become_their_exact_products_and_extra_layers_are_left_out(tmp_path: Path) -> None:
    (found,) = run_ranks(of_fp8, 1, tmp_path)
    assert found["lost"] == []
    assert found["quantised"] > 50
    assert "left out 3 tensors: 1 multi-token-prediction layer(s), which a policy does not use\n" in found["said"]
    assert not any("FAILED" in text for text in (found["said"], *found["back"]))
    for config in found["configs"]:
        assert "quantization_config" not in config
        assert config["num_nextn_predict_layers"] == 0
        assert config["kept_by_export"] is None
