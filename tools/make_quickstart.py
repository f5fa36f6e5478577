"""Write the quickstart: a tiny Qwen3 that half knows how to sort digits, its tokenizer, and train and test problems.

In: an output directory, a seed and a variant of the task. Out: `model/` (Hugging Face), `train.jsonl`, `test.jsonl` and
`quickstart.json` (settings and accuracies), the same bytes for the same settings. Must never train with RL itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argument_types import not_negative
from quickstart import problems
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rlmegatron.cli import count_of
from rlmegatron.platform.torchvision_ops import install_torchvision_hook

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

RECIPE = 1  # raise it when the same settings come to mean other bytes
NUM_TRAIN = 24_000
NUM_TEST = 512
START_BAND = (0.2, 0.5)
MANIFEST = "quickstart.json"

Accuracies = dict[str, dict[str, float]]
Settings = dict[str, int | str]


def main(argv: Sequence[str] | None = None) -> int:
    """Make the directory, or say that it is there already; returns the exit code."""
    arguments = parse(argv)
    settings: Settings = {
        "recipe": RECIPE,
        "variant": arguments.variant,
        "seed": arguments.seed,
        "threads": arguments.threads,
    }
    console = Console(soft_wrap=True, highlight=False)
    try:
        if (accuracies := finished(arguments.out, settings)) is not None:
            console.print(f"quickstart: {arguments.out} is there already ({summary(accuracies)})")
            return 0
        make(arguments.out, settings, console)
    except (ValueError, OSError) as error:
        print(f"make_quickstart: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    parser = argparse.ArgumentParser(description="Make the quickstart's model and data (under a minute on two cores).")
    parser.add_argument("--out", type=Path, required=True, help="directory to make, for example runs/quickstart")
    parser.add_argument(
        "--seed", type=not_negative, default=1, help="seed of the model and of the problems (default 1)"
    )
    parser.add_argument(
        "--variant",
        choices=sorted(problems.VARIANTS),
        default="sort5",
        help="sort5: five digits (default); mixed: three, four, six or seven, so that the length foretells the outcome",
    )
    parser.add_argument(
        "--threads",
        type=count_of,
        default=2,
        help="threads of the warm-up; part of what decides its bytes (default 2)",
    )
    return parser.parse_args(argv)


def finished(out: Path, settings: Settings) -> Accuracies | None:
    """The accuracies of a finished directory with these settings, None where there is nothing yet.

    Raises ValueError when `out` holds something else, which is never overwritten.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / MANIFEST).is_file():
        raise ValueError(f"{out} exists and was not made by this tool (no {MANIFEST}); choose another --out or move it")
    manifest = json.loads((out / MANIFEST).read_text())
    if manifest["settings"] != settings:
        raise ValueError(
            f"{out} was made with {_words(manifest['settings'])}, not {_words(settings)}; "
            "choose another --out or remove it"
        )
    accuracies: Accuracies = manifest["held_out"]
    return accuracies


def make(out: Path, settings: Settings, console: Console) -> None:
    """Build everything in a directory beside `out` and rename it at the end, so that a stopped run leaves no `out`.

    Raises ValueError when the warmed-up model is outside `START_BAND`, where RL has nothing to do or to start from.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # so that `finally` runs
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        start = time.monotonic()
        accuracies = _fill(partial, settings, console)
        check_band(accuracies)
        manifest = {"settings": settings, "held_out": accuracies}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        partial.chmod(0o755)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    console.print(f"quickstart: {out} made in {time.monotonic() - start:.0f} s ({summary(accuracies)})")


def check_band(accuracies: Accuracies) -> None:
    """Raise ValueError unless both overall accuracies are inside `START_BAND`."""
    low, high = START_BAND
    if not all(low <= by_length["all"] <= high for by_length in accuracies.values()):
        raise ValueError(
            f"the warm-up ended outside {low:.2f} to {high:.2f} ({summary(accuracies)}), where RL has little to "
            "choose from; try another --seed"
        )


def summary(accuracies: Accuracies) -> str:
    """One phrase: held-out accuracy, greedy and sampled."""
    return f"held-out accuracy greedy {accuracies['greedy']['all']:.2f}, sampled {accuracies['sampled']['all']:.2f}"


def _fill(directory: Path, settings: Settings, console: Console) -> Accuracies:
    # Spinning threads wait for each other's time slices where cores are shared: 7 times slower, three on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded
    install_torchvision_hook()
    import torch
    from quickstart import tiny_model
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # ours is enough
    torch.set_num_threads(int(settings["threads"]))
    variant, seed = problems.VARIANTS[str(settings["variant"])], int(settings["seed"])
    train_rng, test_rng = random.Random(f"train {seed}"), random.Random(f"test {seed}")
    train = [problems.draw_digits(train_rng, variant, held_out=False) for _ in range(NUM_TRAIN)]
    test = problems.draw_distinct(test_rng, variant, NUM_TEST, held_out=True)
    _write_rows(directory / "train.jsonl", train)
    _write_rows(directory / "test.jsonl", test)

    tokenizer = tiny_model.build_tokenizer()
    model = _warm_up_with_progress(tokenizer, variant, seed, console)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    return _accuracies(model, tokenizer, test, seed)


def _warm_up_with_progress(
    tokenizer: PreTrainedTokenizerFast, variant: problems.Variant, seed: int, console: Console
) -> Qwen3ForCausalLM:
    from quickstart import warmup

    columns = (TextColumn("warm-up"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), console=console) as progress:
        task = progress.add_task("warm-up", total=warmup.NUM_STEPS, loss=float("nan"))
        return warmup.warm_up(
            tokenizer, variant, seed=seed, on_step=lambda step, loss: progress.update(task, completed=step, loss=loss)
        )


def _accuracies(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, test: Sequence[str], seed: int
) -> Accuracies:
    from quickstart import warmup

    result = {}
    for mode, sample_seed in (("greedy", None), ("sampled", seed)):
        counts = warmup.accuracy_by_length(model, tokenizer, test, sample_seed=sample_seed)
        overall = sum(right for right, _ in counts.values()) / sum(asked for _, asked in counts.values())
        by_length = {f"{length} digits": round(right / asked, 4) for length, (right, asked) in counts.items()}
        result[mode] = {"all": round(overall, 4), **by_length}
    return result


def _write_rows(path: Path, digits: Sequence[str]) -> None:
    path.write_text("".join(json.dumps(problems.row(problem)) + "\n" for problem in digits))


def _words(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


if __name__ == "__main__":
    sys.exit(main())
