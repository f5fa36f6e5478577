"""All that can be said of a run before a device is touched: its config, models, files, layout and what it names.

In: a config file, overrides and a number of ranks. Out: a `Checked`, or one ConfigError with every problem. Must never
import torch, though the user's own functions may.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from rlmegatron.algorithms.table import TABLE
from rlmegatron.algorithms.table import resolve as resolve_piece
from rlmegatron.config.algorithm_rules import whitened_beside_greedy
from rlmegatron.config.layout import smallest_world
from rlmegatron.config.load import ConfigError, load
from rlmegatron.config.model_card import ModelCard
from rlmegatron.config.own_module import import_own_module
from rlmegatron.config.paths import path_problems
from rlmegatron.config.report import check_report
from rlmegatron.config.rules import is_own_function, problems, warnings
from rlmegatron.config.schema import RunConfig
from rlmegatron.models.card import read_model_card
from rlmegatron.models.table import read_architecture
from rlmegatron.rewards.table import resolve as resolve_reward
from rlmegatron.weight_sync.engine_limits import refuse_what_engines_cannot_serve


@dataclass(frozen=True)
class Checked:
    """A config that passed, and what was learnt on the way."""

    cfg: RunConfig
    card: ModelCard
    critic_card: ModelCard | None
    world_size: int
    world_size_from: str
    ranks_per_node: int | None
    warnings: list[str]

    def report(self) -> str:
        """The text of `--check`."""
        return check_report(
            self.cfg,
            world_size=self.world_size,
            world_size_from=self.world_size_from,
            ranks_per_node=self.ranks_per_node,
            card=self.card,
            critic_card=self.critic_card,
            warnings=self.warnings,
        )


def examine(
    path: str,
    overrides: Sequence[str],
    *,
    world_size: tuple[int, str] | None,
    ranks_per_node: int | None = None,
    plans_only: bool = False,
) -> Checked:
    """Check everything that is known before a device is touched.

    world_size: the number of ranks and where it came from; None takes the fewest that fit. ranks_per_node: None where
    all are on one node. plans_only: models without weights will do. Raises ConfigError with all problems.
    """
    cfg = load(path, overrides)
    found: list[str] = []
    card = _card(found, lambda: read_model_card(cfg.model.path, plans_only=plans_only))
    critic_path = cfg.critic.path if cfg.trains_critic else None
    critic_card = None
    if critic_path:
        critic_card = _card(
            found, lambda: read_model_card(critic_path, key="critic.path", for_critic=True, plans_only=plans_only)
        )
    size, size_from = world_size or (_smallest(cfg), "the fewest that fit; --ranks sets another number")
    known = {f"algorithm.{kind}": names for kind, names in TABLE.items()}
    found += problems(
        cfg, world_size=size, ranks_per_node=ranks_per_node, card=card, critic_card=critic_card, known=known
    )
    if card is not None:
        found += _refusal(lambda: refuse_what_engines_cannot_serve(read_architecture(cfg.model.path)))
    found += path_problems(cfg)
    found += _refusal(lambda: resolve_reward(cfg.reward.name, cfg.reward.args))
    found += _own_pieces(cfg)
    if found or card is None:
        raise ConfigError(found)
    notes = [*warnings(cfg, world_size=size, card=card), *card.absent, *(critic_card.absent if critic_card else ())]
    return Checked(cfg, card, critic_card, size, size_from, ranks_per_node, notes)


def _own_pieces(cfg: RunConfig) -> list[str]:
    """What is wrong with the user's own functions that `algorithm` names; names of the table are not looked at."""
    chosen = cfg.algorithm.model_dump()
    own = [(kind, str(chosen[kind])) for kind in TABLE if is_own_function(str(chosen[kind]))]
    return [problem for kind, name in own for problem in _own_piece(cfg, kind, name)]


def _own_piece(cfg: RunConfig, kind: str, name: str) -> Iterator[str]:
    """Imports it, which may load torch."""
    try:
        import_own_module(name)
    except ValueError as error:
        yield f"algorithm.{kind}: {error}"
        return
    try:
        piece = resolve_piece(kind, name)
    except ValueError as error:
        yield f"algorithm.{error}"
        return
    if kind == "advantage":
        yield from _own_advantage(cfg, name, piece.inputs)


def _own_advantage(cfg: RunConfig, name: str, inputs: Collection[str]) -> Iterator[str]:
    """What the table's traits say of the others."""
    takes_values = "values" in inputs
    if takes_values and not cfg.trains_critic:
        yield f"algorithm.advantage: {name!r} takes 'values', which come from a critic; set critic.enabled: true"
    if cfg.trains_critic and not takes_values:
        yield f"critic.enabled: true is given, but algorithm.advantage {name!r} does not take 'values'; remove it"
    if "greedy_rewards" in inputs:
        yield from whitened_beside_greedy(cfg)


def _smallest(cfg: RunConfig) -> int:
    return smallest_world(cfg.parallel, engine_tensor=cfg.rollout.tensor)


def _card(found: list[str], read: Callable[[], ModelCard]) -> ModelCard | None:
    """The card, or None with the reasons added to `found`."""
    try:
        return read()
    except ValueError as error:
        found.extend(str(error).splitlines())
        return None


def _refusal(check: Callable[[], object]) -> list[str]:
    """What a higher layer's own check says, if it refuses."""
    try:
        check()
    except ValueError as error:
        return str(error).splitlines()
    return []
