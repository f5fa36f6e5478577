"""All that can be said of a run before a device is touched: its config, models, files, layout and what it names.

In: a config file, overrides and a number of ranks. Out: a `Checked`, or one ConfigError with every problem. Must never
import torch, though the user's own functions may.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlmegatron.algorithms.table import FORMS, TABLE, Piece
from rlmegatron.algorithms.table import resolve as resolve_piece
from rlmegatron.config.algorithm_rules import whitened_beside_greedy
from rlmegatron.config.layout import smallest_world
from rlmegatron.config.load import ConfigError, load
from rlmegatron.config.model_card import ModelCard
from rlmegatron.config.own_module import import_own_module
from rlmegatron.config.paths import path_problems, usable_data_files
from rlmegatron.config.report import check_report
from rlmegatron.config.rules import is_own_function, problems, warnings
from rlmegatron.config.schema import RunConfig
from rlmegatron.config.wording import as_typed
from rlmegatron.data.first_rows import first_rows
from rlmegatron.metrics.optional import missing_packages
from rlmegatron.models.card import read_model_card
from rlmegatron.models.table import read_architecture
from rlmegatron.rewards.columns import column_problems
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
    own_inputs: Mapping[str, Sequence[str]]
    """What the user's own functions take, by the key of `algorithm` that names one, in the order of their form."""
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
            own_inputs=self.own_inputs,
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
    # Resolved once: a module that does not import would run again, down to its error, at every further try.
    refused = _reward_refusal(cfg)
    found += [*refused, *_row_problems(cfg, can_judge=not refused)]
    found += missing_packages(cfg.logging)
    own = _own_pieces(cfg, found)
    if found or card is None:
        raise ConfigError(found)
    notes = [*warnings(cfg, world_size=size, card=card), *card.absent, *(critic_card.absent if critic_card else ())]
    notes += _unread_settings(cfg, own)
    own_inputs = {one.kind: [key for key in one.form.offered if key in one.inputs] for one in own}
    return Checked(cfg, card, critic_card, size, size_from, ranks_per_node, own_inputs, notes)


def _reward_refusal(cfg: RunConfig) -> list[str]:
    """What is wrong with the reward; one problem, however many lines the error of a user's module has."""
    try:
        resolve_reward(cfg.reward.name, cfg.reward.args)
    except ValueError as error:
        return [str(error)]
    return []


def _row_problems(cfg: RunConfig, *, can_judge: bool) -> list[str]:
    """What prompts and, where the reward `can_judge` at all, rewards miss in the first row of each data file."""
    data = cfg.data
    rows, found = first_rows(usable_data_files(cfg), prompt_key=data.prompt_key, chat_template=data.chat_template)
    if not can_judge:
        return found
    stops = cfg.reward.on_error == "stop"
    return [*found, *column_problems(cfg.reward.name, cfg.reward.args, rows, stops_at_error=stops)]


def _own_pieces(cfg: RunConfig, found: list[str]) -> list[Piece]:
    """The user's own functions that `algorithm` names; what is wrong with them is added to `found`.

    Imports them, which may load torch; names of the table are not looked at.
    """
    chosen = cfg.algorithm.model_dump()
    named = {kind: str(chosen[kind]) for kind in TABLE if is_own_function(str(chosen[kind]))}
    pieces = [piece for kind, name in named.items() if (piece := _own_piece(kind, name, found))]
    for piece in pieces:
        if piece.kind == "advantage":
            found += _own_advantage(cfg, piece.name, piece.inputs)
    return pieces


def _own_piece(kind: str, name: str, found: list[str]) -> Piece | None:
    try:
        import_own_module(name)
    except ValueError as error:
        found.append(f"algorithm.{kind}: {error}")
        return None
    try:
        return resolve_piece(kind, name)
    except ValueError as error:
        found.append(f"algorithm.{error}")
        return None


def _own_advantage(cfg: RunConfig, name: str, inputs: Collection[str]) -> Iterator[str]:
    """What the table's traits say of the others."""
    takes_values = "values" in inputs
    if takes_values and not cfg.trains_critic:
        yield f"algorithm.advantage: {name!r} takes 'values', which come from a critic; set critic.enabled: true"
    if cfg.trains_critic and not takes_values:
        yield f"critic.enabled: true is given, but algorithm.advantage {name!r} does not take 'values'; remove it"
    if "greedy_rewards" in inputs:
        yield from whitened_beside_greedy(cfg)


def _unread_settings(cfg: RunConfig, own: Sequence[Piece]) -> Iterator[str]:
    """Settings that were changed for a function that does not take them; of names of the table, `rules` knows."""
    given, usual = cfg.algorithm.model_dump(), type(cfg.algorithm)().model_dump()
    for piece in own:
        if piece.kind == "value_loss" and not cfg.trains_critic:
            continue  # then none of its settings has an effect, whoever takes them
        untaken = {key for form in FORMS[piece.kind] for key in form.offered} - piece.inputs
        for key, value in given.items():
            if key in untaken and value != usual[key]:
                yield f"algorithm.{key}: {as_typed(value)} has no effect on {piece.kind} {piece.name!r}"


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
