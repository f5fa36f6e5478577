"""The command line: has a config checked (`preflight.py`), then trains, or reports what would be trained.

In: arguments. Out: an exit code (0 done, 1 failed, 2 the user's mistake). Must never import torch before training
starts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from rlmegatron import __version__
from rlmegatron.config.load import ConfigError
from rlmegatron.config.schema_json import schema_text
from rlmegatron.distributed.launcher import SEE_REPORT, leave_note
from rlmegatron.preflight import examine

USER_ERROR = 2
RANK_0_SPEAKS_WITHIN_S = 5.0
_RANKS_PER_NODE = 8

_OVERRIDES = """\
overrides:
  section.key=value       sets one key; the value is YAML, and the last one of a key wins
  train.steps=20          rollout.stop_token_ids=[1,2]      critic.path=null
  eval.sets.test=t.jsonl  rollout.engine_args.log_level=info
  data.train='[{path: a.jsonl}, {path: b.jsonl, weight: 2}]'
  Paths are relative to the working directory. yaml_configs/schema.json describes every key (editors can use it).
"""
_EXIT_CODES = """\
exit codes:
  0  done, or the check passed
  1  the run failed
  2  the configuration or the command line is wrong; nothing was started
"""
_TRAIN_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 8 launch/train.py --config my.yaml
  torchrun --nproc-per-node 2 launch/train.py --config my.yaml train.steps=20 actor.optimizer.lr=1e-6
  python launch/train.py --config my.yaml --check
  python launch/train.py --config my.yaml --check --ranks 512 --ranks-per-node 8
"""
_MAIN_EXAMPLES = """\
examples:
  python -m rlmegatron doctor
  python -m rlmegatron check --config my.yaml --ranks 64 parallel.tensor=8
  python -m rlmegatron schema > yaml_configs/schema.json
"""


def train_main(arguments: Sequence[str]) -> int:
    """`launch/train.py`: train, or with --check only say what would be trained."""
    parser = _train_parser()
    given = _parse(parser, arguments)
    for option, value in (("--ranks", given.ranks), ("--ranks-per-node", given.ranks_per_node)):
        if value is not None and not given.check:
            parser.error(f"{option} goes with --check; a run has as many ranks as torchrun starts")
    return _reporting_mistakes(given.config, lambda: _check(given) if given.check else _train(given))


def main(arguments: Sequence[str]) -> int:
    """`python -m rlmegatron`: the commands that need no torchrun."""
    given = _parse(_main_parser(), arguments)
    if given.command == "doctor":
        from rlmegatron.platform.doctor import doctor

        text, code = doctor()
        print(text)
        return code
    if given.command == "schema":
        print(schema_text(), end="")
        return 0
    return _reporting_mistakes(given.config, lambda: _check(given))


def _check(given: argparse.Namespace) -> int:
    world_size = None
    if given.ranks is not None:
        world_size = (given.ranks, "from --ranks")
    elif "WORLD_SIZE" in os.environ:
        world_size = (_in_environment("WORLD_SIZE"), "from WORLD_SIZE")
    per_node = given.ranks_per_node or _environment_per_node() or _RANKS_PER_NODE
    checked = examine(given.config, given.overrides, world_size=world_size, ranks_per_node=per_node, plans_only=True)
    if _speaks():
        print(checked.report())
    return 0


def _train(given: argparse.Namespace) -> int:
    world_size = (1, "without torchrun")
    if "WORLD_SIZE" in os.environ:
        world_size = (_in_environment("WORLD_SIZE"), "from torchrun")
    checked = examine(given.config, given.overrides, world_size=world_size, ranks_per_node=_environment_per_node())
    if _speaks():
        for warning in checked.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    from rlmegatron.trainer.main import main as run_training

    return run_training(checked.cfg)


def _reporting_mistakes(config: str, work: Callable[[], int]) -> int:
    """Exit code of `work`; the user's mistakes are printed once, and every rank ends with the same code."""
    try:
        return work()
    except ConfigError as error:
        who = ""
        if not _speaks():
            # Rank 0 finds the same and is given the time to say so, for torchrun ends all ranks with the first. Who is
            # still here after that found what rank 0 did not, such as a file that this node lacks.
            time.sleep(RANK_0_SPEAKS_WITHIN_S)
            who = f"rank {os.environ['RANK']}: "
        count = len(error.problems)
        heading = f"{who}{config}: {count} problem{'' if count == 1 else 's'}, nothing was started"
        print("\n".join([heading, *(f"  {problem}" for problem in error.problems)]), file=sys.stderr, flush=True)
        leave_note(SEE_REPORT)
        return USER_ERROR


def _speaks() -> bool:
    """Whether this process is the one of the job that prints before ranks know each other."""
    return os.environ.get("RANK", "0") == "0"


def _environment_per_node() -> int | None:
    return _in_environment("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else None


def _in_environment(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError([f"{name}: '{text}' in the environment is not allowed; use a whole number above 0"])
    return int(text)


def _train_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch/train.py",
        description="Train a language model with reinforcement learning, on every rank that torchrun starts.",
        epilog="\n".join((_TRAIN_EXAMPLES, _OVERRIDES, _EXIT_CODES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_config(parser)
    parser.add_argument("--check", action="store_true", help="validate, print the layout, and start nothing")
    _add_ranks(parser)
    return parser


def _main_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rlmegatron",
        description="Tools around a run; training itself is started by launch/train.py.",
        epilog="\n".join((_MAIN_EXAMPLES, _EXIT_CODES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "doctor", help="what is installed here, and what each absence means (exit code 1: no run can start)"
    )
    commands.add_parser("schema", help="print the JSON schema of a config file")
    check = commands.add_parser(
        "check",
        help="validate a config and print its layout, as launch/train.py --check does",
        epilog="\n".join((_OVERRIDES, _EXIT_CODES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_config(check)
    _add_ranks(check)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="the YAML file of the run")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings on top of the file"
    )


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=count_of,
        metavar="N",
        help="number of ranks to check for; default: WORLD_SIZE, else the fewest that fit",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=count_of,
        metavar="N",
        help=f"GPUs of a node, which no engine spans; default: LOCAL_WORLD_SIZE, else {_RANKS_PER_NODE}",
    )


def count_of(text: str) -> int:
    """An argument that counts something, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Like `parse_args`, but overrides may also stand after options that follow other overrides."""
    given, rest = parser.parse_known_args(arguments)
    for word in rest:
        if word.startswith("-"):
            name = word.lstrip("-").partition("=")[0]
            hint = f"; an override has no dashes: {name}=VALUE" if "." in name else ""
            parser.error(f"unknown option {word}{hint}")
    if rest:
        given.overrides = [*given.overrides, *rest]
    return given
