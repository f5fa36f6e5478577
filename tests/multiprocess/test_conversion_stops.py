"""A conversion that is killed, runs out of disk or finds a mistake never looks finished, and goes on where it stood.

What this does not prove: that a disk keeps what it says it has synced.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conversions import contents, differing, to_hf, to_mcore, weights
from family_models import write_variant
from ranks import RanksFailed, run_ranks

from rlmegatron.models.dist_checkpoint import read_metadata

VARIANT = "qwen3-moe"  # six groups: the embedding, four layers, the head


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / VARIANT
    run_ranks(write_source, 1, directory)
    return directory


def write_source(directory: Path) -> None:
    """Its vocabulary is larger than the buffer of an open file."""
    write_variant(directory, VARIANT, vocab_size=3000)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mcore and hf, by conversions that nobody stopped."""
    out = tmp_path_factory.mktemp("whole")

    run_ranks(both_ways, 1, source, out)
    return out


def both_ways(source: Path, out: Path) -> None:
    assert "FAILED" not in to_mcore(source, out / "mcore")
    assert "FAILED" not in to_hf(out / "mcore", out / "hf")


def after_groups(number: int, act: Callable[[], None]) -> list[int]:
    """Act when so many groups have been noted; the list fills with the groups that are noted from now on."""
    from rlmegatron.conversion.journal import Journal

    original, noted = Journal.note, []

    def note(self: Journal, item: int | str, result: Any) -> None:
        original(self, item, result)
        if isinstance(item, int):
            noted.append(item)
            if len(noted) == number:
                act()

    Journal.note = note  # type: ignore[method-assign]  # this process ends with the function
    return noted


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_after_three_groups(convert: Callable[..., str], source: Path, out: Path) -> None:
    after_groups(3, die)
    convert(source, out)


def groups_done(convert: Callable[..., str], source: Path, out: Path) -> tuple[str, list[int]]:
    noted = after_groups(-1, die)
    return convert(source, out), noted


@pytest.mark.parametrize(
    ("convert", "given", "made"), [(to_mcore, "", "mcore"), (to_hf, "mcore", "hf")], ids=["in", "out"]
)
def test_a_killed_conversion_goes_on_where_it_stood(
    source: Path, whole: Path, tmp_path: Path, convert: Callable[..., str], given: str, made: str
) -> None:
    start, out = whole / given if given else source, tmp_path / "out"
    with pytest.raises(RanksFailed, match="the process died"):
        run_ranks(killed_after_three_groups, 1, convert, start, out)
    assert not out.exists()
    assert not (tmp_path / "out.partial/.metadata").exists()
    assert not (tmp_path / "out.partial/config.json").exists()
    ((said, noted),) = run_ranks(groups_done, 1, convert, start, out)
    assert "FAILED" not in said
    assert noted == [3, 4, 5]
    assert contents(out) == contents(whole / made)
    assert os.listdir(tmp_path) == ["out"]


def killed_while_reserving(mcore: Path, out: Path) -> None:
    original = os.posix_fallocate

    def reserve(handle: int, offset: int, length: int) -> None:
        original(handle, offset, length)
        die()

    os.posix_fallocate = reserve
    to_hf_in_small_files(mcore, out)


def to_hf_in_small_files(mcore: Path, out: Path) -> str:
    return to_hf(mcore, out, bytes_per_file=100_000)


def test_files_that_were_not_reserved_to_the_end_are_begun_anew(whole: Path, source: Path, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        run_ranks(killed_while_reserving, 1, whole / "mcore", tmp_path / "out")
    assert list((tmp_path / "out.partial").glob("*.safetensors"))
    (said,) = run_ranks(to_hf_in_small_files, 1, whole / "mcore", tmp_path / "out")
    assert "FAILED" not in said
    assert differing(weights(tmp_path / "out"), weights(source)) == []


def refusals(source: Path, whole: Path, out: Path) -> dict[str, str]:
    """What is said when a stopped conversion to `out` meets something else than it was begun with."""
    from rlmegatron.conversion.dist_files import DistWriter

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    write, DistWriter.write = DistWriter.write, full  # type: ignore[method-assign]
    copy = shutil.copytree(source, out / "copy")
    found = {"full": to_mcore(copy, out / "a")}
    DistWriter.write = write  # type: ignore[method-assign]
    found["dtype"] = to_mcore(copy, out / "a", dtype="bf16")
    found["other source"] = to_mcore(source, out / "a")
    found["other direction"] = to_hf(whole / "mcore", out / "a")
    os.utime(copy / "model.safetensors", ns=(0, 1))
    found["touched"] = to_mcore(copy, out / "a")
    (out / "b").mkdir()
    found["exists"] = to_mcore(copy, out / "b")
    (out / "c.partial").mkdir()
    found["foreign"] = to_mcore(copy, out / "c")
    return found


def test_something_else_is_refused(source: Path, whole: Path, tmp_path: Path) -> None:
    (found,) = run_ranks(refusals, 1, source, whole, tmp_path)
    assert "No space left on device" in found["full"]
    for case, changed in (
        ("dtype", "--dtype"),
        ("other source", "--hf"),
        ("other direction", "--file-gb, --hf, --mcore, .metadata, config.json, model.safetensors"),
        ("touched", "model.safetensors"),
    ):
        assert found[case] == (
            f"FAILED {tmp_path}/a.partial is an unfinished conversion of something else (changed: {changed}); "
            "delete it or give another --out"
        )
    assert found["exists"] == f"FAILED {tmp_path}/b exists already; delete it or give another --out"
    assert found["foreign"] == (
        f"FAILED {tmp_path}/c.partial is no unfinished conversion; delete it or give another --out"
    )


def both_at_once(source: Path, out: Path) -> str:
    """What a conversion is told that begins while another process is at it."""
    import multiprocessing

    answers: list[str] = []

    def begin_another() -> None:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            answers.append(pool.apply(open_journal, (out,)))

    after_groups(2, begin_another)
    assert "FAILED" not in to_mcore(source, out)
    return answers[0]


def open_journal(out: Path) -> str:
    from rlmegatron.conversion.journal import Journal

    try:
        Journal(out).open({})
    except ValueError as error:
        return str(error)
    return ""


def test_a_second_process_does_not_write_into_the_same_files(source: Path, tmp_path: Path) -> None:
    (said,) = run_ranks(both_at_once, 1, source, tmp_path / "out")
    assert said == f"another process is writing {tmp_path}/out.partial; wait for it or give another --out"


def syncs_before_notes(mcore: Path, out: Path) -> list[str]:
    """Names of safetensors files as they are synced, and "note" whenever a group is said to be finished."""
    events: list[str] = []
    original = os.fsync

    def fsync(handle: int) -> None:
        original(handle)
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).suffix)

    os.fsync = fsync  # type: ignore[assignment]
    after_groups(-1, die)
    from rlmegatron.conversion.journal import Journal

    note = Journal.note
    Journal.note = lambda self, item, result: (events.append(f"note {item}"), note(self, item, result))[1]  # type: ignore
    to_hf(mcore, out)
    return events


def test_weights_are_on_the_disk_before_their_group_counts_as_finished(whole: Path, tmp_path: Path) -> None:
    (events,) = run_ranks(syncs_before_notes, 1, whole / "mcore", tmp_path / "out")
    for number in range(6):
        assert events[events.index(f"note {number}") - 1] == ".safetensors"


def on_a_small_disk(source: Path, whole: Path, out: Path) -> dict[str, Any]:
    """What is said in both directions when the disk is full from the start, and when it fills while files grow."""
    found: dict[str, Any] = {}
    original = shutil.disk_usage
    shutil.disk_usage = lambda path: original(path)._replace(free=1000)  # type: ignore[assignment]
    found["mcore at once"] = to_mcore(source, out / "a")
    shutil.disk_usage = original
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))
    found["mcore midway"] = to_mcore(source, out / "a")
    found["hf at once"] = to_hf(whole / "mcore", out / "b")
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    pwrite = os.pwrite

    def full(handle: int, data: Any, offset: int) -> int:
        if offset > 200_000:
            raise OSError(28, "No space left on device")
        return pwrite(handle, data, offset)

    os.pwrite = full  # type: ignore[assignment]
    found["hf midway"] = to_hf(whole / "mcore", out / "b")
    os.pwrite = pwrite
    found["directories"] = sorted(os.listdir(out))
    found["then"] = [to_mcore(source, out / "a"), to_hf(whole / "mcore", out / "b")]
    return found


def test_a_full_disk_is_told_and_the_conversion_goes_on_once_there_is_room(
    source: Path, whole: Path, tmp_path: Path
) -> None:
    (found,) = run_ranks(on_a_small_disk, 1, source, whole, tmp_path)
    assert found["mcore at once"].startswith(f"FAILED OSError: {tmp_path}/a.partial: the checkpoint needs ")
    assert found["mcore at once"].endswith(" bytes, the disk has 1,000 left")
    assert found["mcore midway"] == (
        "FAILED the conversion failed on rank 0: OSError: [Errno 27] cannot write it: File too large: "
        f"'{tmp_path}/a.partial/__0_0.distcp'"
    )
    assert f"cannot write {tmp_path}/b.partial/model.safetensors: File too large" in found["hf at once"]
    assert f"cannot write {tmp_path}/b.partial/model.safetensors: No space left" in found["hf midway"]
    assert found["directories"] == ["a.partial", "b.partial"]
    assert not any("FAILED" in said for said in found["then"])
    assert contents(tmp_path / "a") == contents(whole / "mcore")
    assert contents(tmp_path / "b") == contents(whole / "hf")


def verified_with_a_flipped_bit(source: Path, out: Path) -> list[str]:
    """The disk changes one bit after everything was written; then the same command is given again."""
    from rlmegatron.conversion.dist_files import DistWriter

    finish = DistWriter.finish

    def spoil(self: DistWriter, *args: Any) -> None:
        finish(self, *args)
        key = "decoder.layers.2.mlp.experts.experts.linear_fc1.weight"
        stored = [info for index, info in read_metadata(self.directory).storage_data.items() if index.fqn == key]
        path, middle = self.directory / stored[3].relative_path, stored[3].offset + stored[3].length // 2
        values = bytearray(path.read_bytes())
        values[middle] ^= 1
        path.write_bytes(values)

    DistWriter.finish = spoil  # type: ignore[method-assign]
    said = [to_mcore(source, out, verify=True)]
    DistWriter.finish = finish  # type: ignore[method-assign]
    said.append(",".join(os.listdir(out.parent)))
    noted = after_groups(-1, die)
    said.append(to_mcore(source, out, verify=True))
    return [*said, str(noted)]


def test_verify_finds_a_flipped_bit_and_the_next_run_mends_it(source: Path, whole: Path, tmp_path: Path) -> None:
    (said,) = run_ranks(verified_with_a_flipped_bit, 1, source, tmp_path / "out")
    assert said[0].startswith(
        f"FAILED the verification failed on rank 0: {tmp_path}/out.partial: decoder.layers.2.mlp.experts.local_experts."
    )
    assert said[0].endswith("_proj.weight; the same command writes layer 2 anew")
    assert said[1] == "out.partial"
    assert "FAILED" not in said[2]
    assert said[3] == "[3]"
    assert contents(tmp_path / "out") == contents(whole / "mcore")


def one_rank_fails(source: Path, out: Path) -> tuple[str, list[int]]:
    """Rank 1 cannot write its first group; what each says, and the groups it finished."""
    import time

    import torch.distributed as dist

    from rlmegatron.conversion.dist_files import DistWriter

    rank, write = dist.get_rank(), DistWriter.write

    def failing(self: DistWriter, *args: Any, number: int) -> list[Any]:
        if rank == 1:
            raise OSError(5, "Input/output error", "the file")
        time.sleep(1 if number == 0 else 0)
        return write(self, *args, number=number)

    DistWriter.write = failing  # type: ignore[method-assign]
    noted = after_groups(-1, die)
    return to_mcore(source, out), noted


def test_a_failure_on_one_rank_ends_all_with_one_report(source: Path, tmp_path: Path) -> None:
    first, second = run_ranks(one_rank_fails, 2, source, tmp_path / "out", timeout_s=30)
    expected = "FAILED the conversion failed on rank 1: OSError: [Errno 5] Input/output error: 'the file'"
    assert first[0] == second[0] == expected
    assert (first[1], second[1]) == ([0], [])
    assert os.listdir(tmp_path) == ["out.partial"]


def verify_what_is_there(hf: Path, out: Path) -> list[str]:
    """What is said of a finished checkpoint, and of one with a flipped bit."""
    said = [to_mcore(hf, out), to_mcore(hf, out, verify=True)]
    value = weights(hf)["model.layers.1.mlp.down_proj.weight"].flatten()[:8].numpy().tobytes()
    shard = next(path for path in out.glob("*.distcp") if value in path.read_bytes())
    damaged = bytearray(shard.read_bytes())
    damaged[damaged.index(value)] ^= 1
    shard.write_bytes(damaged)
    return [*said, to_mcore(hf, out, verify=True)]


def test_a_finished_conversion_can_still_be_verified(tmp_path: Path) -> None:
    run_ranks(write_variant, 1, tmp_path / "hf", "mistral")
    (first, good, bad), *_ = run_ranks(verify_what_is_there, 1, tmp_path / "hf", tmp_path / "mcore")
    assert f"wrote {tmp_path / 'mcore'}: " in first
    assert "is there already: verifying it" in good and "tensors are those of the source, bit for bit" in good
    assert bad.startswith("FAILED") and "delete it and convert again" in bad
    assert (tmp_path / "mcore" / ".metadata").is_file()
