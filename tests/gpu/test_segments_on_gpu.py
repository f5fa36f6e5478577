"""The segment kernel on a CUDA device: what it copies, in which order, and how fast beside a plain copy.

The speed is compared within one run, on the same bytes and alternately, and holds for the device it is run on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from rlmegatron.weight_sync.segments import SegmentTable, copy_segments, copy_segments_in_torch, is_built
from tests.unit.weight_sync.segment_tables import Case, cases, copy_slowly

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
# Of what a plain copy of as many bytes reaches.
LEAST_BANDWIDTH = 0.85


def table_of(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 8)


def copy_on_gpu(case: Case) -> None:
    """Executes the table on copies of the tensors on the device, at addresses aligned as theirs; brings them back."""
    sources = [_moved(source) for source in case.sources]
    buffers = [buffer.to(CUDA) for buffer in case.buffers]
    places = [(tensor.storage_offset(), tensor.numel()) for tensor in case.destinations]
    destinations = [buffer[start : start + size] for buffer, (start, size) in zip(buffers, places, strict=True)]
    copy_segments(SegmentTable.of(case.table, sources, destinations), sources, destinations)
    for buffer, changed in zip(case.buffers, buffers, strict=True):
        buffer.copy_(changed)


def _moved(source: Tensor) -> Tensor:
    whole = torch.zeros(source.storage_offset() + source.numel(), dtype=source.dtype, device=CUDA)
    whole[source.storage_offset() :].copy_(source)
    return whole[source.storage_offset() :]


def test_the_kernel_was_built_for_this_device() -> None:
    assert is_built("cuda"), "install the package again where nvcc is found"
    copy_on_gpu(Case(table_of([0, 0, 1, 0, 0, 1, 1, 1]), [torch.ones(1)], [torch.zeros(1)], [torch.zeros(1)]))


@pytest.mark.parametrize(
    ("most_columns", "most_segments"), [(40, 12), (1500, 6), (3, 300)], ids=["small", "several tiles", "tiny"]
)
def test_random_tables_are_copied_as_by_a_slow_loop(most_columns: int, most_segments: int) -> None:
    """Odd offsets, casts with denormals, infinities and NaN; what the table does not name stays poisoned."""

    @given(case=cases(most_columns=most_columns, most_segments=most_segments))
    @settings(deadline=None, max_examples=100)
    def check(case: Case) -> None:
        slow, fast = case.poisoned(), case.poisoned()
        copy_slowly(slow.table, slow.sources, slow.destinations)
        copy_on_gpu(fast)
        for one, other in zip(slow.bits(), fast.bits(), strict=True):
            assert np.array_equal(one, other)

    check()


def test_fp32_is_rounded_to_bf16_as_torch_does_on_the_device() -> None:
    """All upper halves, with lower halves below, at and above the middle; a NaN stays one."""
    upper = torch.arange(1 << 16, dtype=torch.int64, device=CUDA)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], device=CUDA)
    bits = (upper | lower).flatten()
    source = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    size = source.numel()
    for columns in (size, 16, 8, 6, 3, 1):
        destination = torch.zeros(size, dtype=torch.bfloat16, device=CUDA)
        table = SegmentTable.of(
            table_of([0, 0, columns, 0, 0, columns, size // columns, columns]), [source], [destination]
        )
        copy_segments(table, [source], [destination])
        number = ~source.isnan()
        assert torch.equal(destination.isnan(), source.isnan())
        assert torch.equal(destination.view(torch.int16)[number], source.bfloat16().view(torch.int16)[number])


def test_offsets_and_strides_may_exceed_32_bits() -> None:
    stride = (1 << 32) + 48
    source = torch.zeros(2 * stride, dtype=torch.uint8, device=CUDA)
    destination = torch.zeros(stride + 64, dtype=torch.uint8, device=CUDA)
    source[stride + 16 : stride + 32] = 5
    source[16:32] = 3
    table = SegmentTable.of(table_of([0, 16, stride, 0, 32, stride, 2, 16]), [source], [destination])
    copy_segments(table, [source], [destination])
    assert destination[32:48].eq(3).all()
    assert destination[stride + 32 : stride + 48].eq(5).all()
    assert int(destination.sum()) == 16 * 3 + 16 * 5


def test_a_row_longer_than_32_bits_can_count_is_copied_whole() -> None:
    size = (1 << 32) + 12345
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=CUDA)
    destination = torch.zeros(size + 2, dtype=torch.uint8, device=CUDA)
    table = SegmentTable.of(table_of([0, 0, size, 0, 1, size, 1, size]), [source], [destination])
    copy_segments(table, [source], [destination])
    assert torch.equal(destination[1:-1], source)
    assert int(destination[0]) == int(destination[-1]) == 0


def test_the_copy_takes_its_place_on_the_current_stream() -> None:
    """What the stream did before is copied, and what it does later is not."""
    size = 1 << 26
    source, destination = torch.zeros(size, device=CUDA), torch.zeros(size, device=CUDA)
    table = SegmentTable.of(table_of([0, 0, size, 0, 0, size, 1, size]), [source], [destination])
    stream = torch.cuda.Stream(CUDA)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for value in range(1, 20):
            source.fill_(float(value))
        copy_segments(table, [source], [destination])
        source.fill_(-1.0)
    stream.synchronize()
    assert destination.eq(19.0).all()


def test_a_second_device_leaves_the_current_one_as_it_was() -> None:
    """The sources lie on the first device, the destinations on the second, which reads them there."""
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(1, 0):
        pytest.skip("needs two devices with access to each other")
    source = torch.arange(1000.0, device=CUDA)
    destination = torch.zeros(1000, device="cuda:1")
    # Torch gives the second device access with its first copy.
    destination.copy_(source).zero_()
    table = SegmentTable.of(table_of([0, 0, 1000, 0, 0, 1000, 1, 1000]), [source], [destination])
    torch.cuda.synchronize()
    copy_segments(table, [source], [destination])
    assert torch.equal(destination.cpu(), source.cpu())
    assert torch.cuda.current_device() == 0


def grid(*, num_segments: int, num_rows: int, columns: int, gap: int) -> np.ndarray:
    """Boxes one behind the other in the destination, in the source with gaps between rows, in random order."""
    number = np.arange(num_segments)
    rows = np.zeros((num_segments, 8), dtype=np.int64)
    rows[:, 1] = number * num_rows * (columns + gap)
    rows[:, 2] = columns + gap
    rows[:, 4] = number * num_rows * columns
    rows[:, 5] = columns
    rows[:, 6] = num_rows
    rows[:, 7] = columns
    return rows[np.random.default_rng(1).permutation(num_segments)]


LAYOUTS = {
    "one row": grid(num_segments=1, num_rows=1, columns=1 << 30, gap=0),
    "matrices": grid(num_segments=128, num_rows=4096, columns=2048, gap=2048),
    "short rows": grid(num_segments=64, num_rows=1 << 16, columns=256, gap=768),
    "many small": grid(num_segments=1 << 16, num_rows=1, columns=1 << 14, gap=1 << 14),
    "huge and tiny": np.concatenate(
        [
            grid(num_segments=2, num_rows=4096, columns=1 << 16, gap=0),
            grid(num_segments=1 << 16, num_rows=1, columns=512, gap=0) + table_of([0, 1 << 29, 0, 0, 1 << 29, 0, 0, 0]),
        ]
    ),
}


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_reaches_most_of_the_bandwidth_of_a_plain_copy(
    layout: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    rows = LAYOUTS[layout]
    from_size, to_size = (
        int((rows[:, offset] + (rows[:, 6] - 1) * rows[:, offset + 1] + rows[:, 7]).max()) for offset in (1, 4)
    )
    source = torch.randn(from_size, dtype=torch.float32, device=CUDA).to(dtypes[0])
    destination = torch.zeros(to_size, dtype=dtypes[1], device=CUDA)
    table = SegmentTable.of(rows, [source], [destination])
    num_elements = table.num_bytes // destination.element_size()
    plain_from, plain_to = source[:num_elements], torch.empty(num_elements, dtype=dtypes[1], device=CUDA)
    seconds = _alternate(
        lambda: copy_segments(table, [source], [destination]), lambda: plain_to.copy_(plain_from), rounds=15
    )
    kernel, plain = (table.num_bytes / second / 1e9 for second in seconds)
    moved = f"{layout}, {dtypes[0]} to {dtypes[1]}: {table.num_bytes / 1e9:.2f} GB in {len(rows)} segments"
    print(f"\n{moved}: kernel {kernel:.0f} GB/s, plain copy {plain:.0f} GB/s written, {kernel / plain:.0%}")
    expected = torch.zeros_like(destination)
    copy_segments_in_torch(table.rows, [source], [expected])
    assert torch.equal(destination.view(torch.int16), expected.view(torch.int16))
    assert kernel >= LEAST_BANDWIDTH * plain, moved


def _alternate(*works: Callable[[], object], rounds: int) -> list[float]:
    """The median seconds of each on the device, after three rounds that do not count."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(rounds + 3):
        for number, work in enumerate(works):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            # Keeps the device busy while the work is being queued, so that the time between the events is its own.
            torch.cuda._sleep(20_000_000)
            first.record()
            work()
            last.record()
            torch.cuda.synchronize()
            taken[number].append(first.elapsed_time(last) / 1e3)
    return [float(np.median(seconds[3:])) for seconds in taken]
