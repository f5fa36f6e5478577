"""Keys of other libraries are answered with ours, wherever they are written, unless ours are nearer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from rlmegatron.config import other_libraries
from rlmegatron.config.explain import allowed
from rlmegatron.config.load import ConfigError, load
from rlmegatron.config.schema import RunConfig
from rlmegatron.config.section import Section
from rlmegatron.config.wording import plain
from rlmegatron.rewards.table import REWARDS

MakeConfig = Callable[..., Path]


def problems_of(path: Path, override: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, [override])
    return [line.removesuffix(" (command line)") for line in caught.value.problems]


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("train.total_epochs", "train.steps; theirs counts passes over the data"),
        ("algorithm.adv_estimator", "algorithm.advantage"),
        ("actor.kl_loss_coef", "algorithm.kl.coef; it needs algorithm.kl.where: loss"),
        ("algorithm.beta", "algorithm.kl.coef; it needs algorithm.kl.where: loss or reward"),
        ("algorithm.kl_coef", "algorithm.kl.coef; it needs algorithm.kl.where: loss or reward"),
        ("rollout.stop", "rollout.stop_token_ids; it takes token ids, not text"),
        ("rollout.response_length", "rollout.max_new_tokens"),
        ("data.max_response_length", "rollout.max_new_tokens"),
        ("max_completion_length", "rollout.max_new_tokens"),
        ("rollout.n", "rollout.samples_per_prompt"),
        ("num_generations", "rollout.samples_per_prompt"),
        ("reward.answer_key", "reward.args.answer_key"),
        ("reward.max_tokens", "reward.args.max_tokens"),
        ("rollout.gpu_memory_utilization", "rollout.mem_fraction"),
        ("rollout.GPU-memory-utilization", "rollout.mem_fraction"),
        (
            "data.train_batch_size",
            "rollout.prompts_per_step; that of OpenRLHF counts answers and decides train.mini_batches",
        ),
        # The section decides where theirs has several meanings.
        ("rollout.tensor_model_parallel_size", "rollout.tensor"),
        ("parallel.tensor_model_parallel_size", "parallel.tensor"),
        ("actor.tensor_model_parallel_size", "parallel.tensor or rollout.tensor"),
        ("algorithm.epsilon", "algorithm.clip_low"),
        ("critic.learning_rate", "critic.optimizer.lr"),
        # Below a section that only theirs has.
        ("trainer.total_epochs", "train.steps; theirs counts passes over the data"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coef; it needs algorithm.kl.where: loss or reward"),
    ],
)
def test_a_key_of_another_library_is_answered_with_ours(make_config: MakeConfig, key: str, answer: str) -> None:
    assert problems_of(make_config(), f"{key}=1") == [f"{key}: unknown key; here it is {answer}"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("algorithm.entropy_coeff", "algorithm.entropy_coef"),
        ("actor.optimizer.beta", "actor.optimizer.betas"),
        ("actor.optimizer.epsilon", "actor.optimizer.eps"),
        ("eval.max_tokens", "eval.max_new_tokens"),
        ("algorithm.Clip-High", "algorithm.clip_high"),
    ],
)
def test_a_key_of_ours_that_is_nearer_comes_first(make_config: MakeConfig, key: str, meant: str) -> None:
    (line,) = problems_of(make_config(), f"{key}=1")
    assert line.startswith(f"{key}: unknown key; did you mean {meant}?")


def test_every_key_of_a_foreign_section_has_its_line(make_config: MakeConfig) -> None:
    given = "actor_rollout_ref={rollout: {n: 4, tensor_model_parallel_size: 2}, actor: {optim: {lr: 1e-6}}, zzz: 1}"
    lines = problems_of(make_config(), given)
    assert lines[:3] == [
        "actor_rollout_ref.rollout.n: unknown key; here it is rollout.samples_per_prompt",
        "actor_rollout_ref.rollout.tensor_model_parallel_size: unknown key; here it is rollout.tensor",
        "actor_rollout_ref.actor.optim.lr: unknown key; did you mean actor.optimizer.lr or critic.optimizer.lr?",
    ]
    assert lines[3].startswith("actor_rollout_ref.zzz: unknown key; the file has name, run_dir, ")
    (section,) = problems_of(make_config(), "algorithm.filter_groups={enable: true}")
    assert section == "algorithm.filter_groups: unknown key; here it is rollout.dynamic_sampling"


@pytest.mark.parametrize("key", sorted(other_libraries._KEYS))
def test_every_key_of_ours_that_the_table_names_exists(key: str) -> None:
    assert allowed(tuple(key.split(".")))
    if key.startswith("reward.args."):
        assert key.rpartition(".")[2] in {
            name for one in REWARDS.values() for name in inspect.signature(one.function).parameters
        }


def names_of(section: type[Section]) -> set[str]:
    below = [field.annotation for field in section.model_fields.values()]
    inner = [one for one in below if isinstance(one, type) and issubclass(one, Section)]
    return {*section.model_fields, *(name for one in inner for name in names_of(one))}


def test_no_key_of_theirs_is_one_of_ours() -> None:
    """One that is ours in another section is answered by its own name."""
    assert {plain(name) for name in names_of(RunConfig)} & other_libraries._OURS.keys() == set()


def test_every_note_is_of_a_key_in_the_table() -> None:
    assert other_libraries._NOTE_OF.keys() - other_libraries._OURS.keys() == set()
