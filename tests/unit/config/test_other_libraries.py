"""Keys of other libraries are answered with ours, wherever they are written, unless ours are nearer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rlmegatron.algorithms.table import TABLE
from rlmegatron.config import other_libraries
from rlmegatron.config.explain import _all_paths, allowed
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
        # One of theirs bounds both sides, unless it is an optimizer's.
        ("algorithm.epsilon", "algorithm.clip_low or algorithm.clip_high"),
        ("epsilon", "algorithm.clip_low or algorithm.clip_high"),
        ("actor.epsilon", "algorithm.clip_low or algorithm.clip_high"),
        # Of evaluation only where that is what the section is for.
        ("eval.n", "eval.samples"),
        ("eval.num_generations", "eval.samples"),
        (
            "actor.target_kl",
            "algorithm.kl.target or train.max_kl; algorithm.kl.target adapts a weight, train.max_kl ends a step's "
            "updates early",
        ),
        ("critic.learning_rate", "critic.optimizer.lr"),
        # Below a section that only theirs has.
        ("trainer.total_epochs", "train.steps; theirs counts passes over the data"),
        ("actor_rollout_ref.rollout.n", "rollout.samples_per_prompt"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "eval.samples"),
        ("remote_rm_url", "reward.name; a reward is a function, which may ask a server"),
        (
            "lr_warmup_ratio",
            "actor.optimizer.warmup_steps or critic.optimizer.warmup_steps; theirs is a share of all steps",
        ),
        ("critic.lr_warmup_steps", "critic.optimizer.warmup_steps"),
        ("critic.scheduler.lr_warmup_steps", "critic.optimizer.warmup_steps"),
        ("train_max_tokens_per_gpu", "train.micro_batch_tokens"),
        (
            "dynamic_filtering_reward_range",
            "rollout.dynamic_sampling; it keeps groups whose rewards differ, not those whose mean lies in a range",
        ),
        ("eval_temperature", "eval.temperature"),
        ("critic.model", "critic.path"),
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
        # One of exactly that name in another section goes before one that is merely like it, not before an equal one.
        ("rollout.max_prompt_tokens", "data.max_prompt_tokens"),
        ("critic.lr", "critic.optimizer.lr"),
        ("critic.Epochs", "critic.epochs"),
    ],
)
def test_a_key_of_ours_that_is_nearer_comes_first(make_config: MakeConfig, key: str, meant: str) -> None:
    (line,) = problems_of(make_config(), f"{key}=1")
    assert line.startswith(f"{key}: unknown key; did you mean {meant}?")


def test_every_key_of_a_foreign_section_has_its_line(make_config: MakeConfig) -> None:
    given = (
        "actor_rollout_ref={rollout: {n: 4, tensor_model_parallel_size: 2, val_kwargs: {temperature: 0.6}, top_k: 20}, "
        "zzz: 1}"
    )
    lines = problems_of(make_config(), given)
    assert lines[:4] == [
        "actor_rollout_ref.rollout.n: unknown key; here it is rollout.samples_per_prompt",
        "actor_rollout_ref.rollout.tensor_model_parallel_size: unknown key; here it is rollout.tensor",
        "actor_rollout_ref.rollout.val_kwargs.temperature: unknown key; did you mean eval.temperature?",
        "actor_rollout_ref.rollout.top_k: unknown key; did you mean rollout.top_k?",
    ]
    assert lines[4].startswith("actor_rollout_ref.zzz: unknown key; the file has name, run_dir, ")


SAMPLING = "algorithm.filter_groups: unknown key; here it is rollout.dynamic_sampling; its 'metric' is called 'by'"
ENABLE = "algorithm.filter_groups.enable: unknown key; did you mean rollout.dynamic_sampling.enabled?"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("algorithm.filter_groups={enable: true}", [SAMPLING, ENABLE]),
        (
            "algorithm.filter_groups={enable: true, metric: acc, max_num_gen_batches: 10}",
            [
                SAMPLING,
                ENABLE,
                "algorithm.filter_groups.max_num_gen_batches: unknown key; here it is "
                "rollout.dynamic_sampling.max_prompts_ratio; theirs counts batches",
            ],
        ),
        (
            "algorithm.kl_ctrl={type: adaptive, horizon: 100, kl_coef: 0.1}",
            [
                "algorithm.kl_ctrl: unknown key; here it is algorithm.kl",
                "algorithm.kl_ctrl.type: unknown key; a target makes it adaptive: algorithm.kl.target",
                "algorithm.kl_ctrl.horizon: unknown key; here it is algorithm.kl.horizon",
                "algorithm.kl_ctrl.kl_coef: unknown key; here it is algorithm.kl.coef; it needs algorithm.kl.where: "
                "loss or reward",
            ],
        ),
        (
            "actor_rollout_ref.actor.optim={lr: 1e-6, weight_decay: 0.1, epsilon: 1e-8}",
            [
                "actor_rollout_ref.actor.optim: unknown key; here it is actor.optimizer",
                "actor_rollout_ref.actor.optim.lr: unknown key; here it is actor.optimizer.lr",
                "actor_rollout_ref.actor.optim.weight_decay: unknown key; here it is actor.optimizer.weight_decay",
                "actor_rollout_ref.actor.optim.epsilon: unknown key; here it is actor.optimizer.eps",
            ],
        ),
        (
            "optim={epsilon: 1e-8, zzz: 1}",
            [
                "optim: unknown key; here it is actor.optimizer or critic.optimizer",
                "optim.epsilon: unknown key; here it is actor.optimizer.eps or critic.optimizer.eps",
            ],
        ),
        (
            "algo={kl: {init_coef: 0.01, estimator: k1}, advantage: {estimator: gae, gamma: 1}}",
            [
                "algo: unknown key; here it is algorithm",
                "algo.kl: unknown key; here it is algorithm.kl",
                "algo.kl.init_coef: unknown key; here it is algorithm.kl.coef; it needs algorithm.kl.where: reward",
                "algo.kl.estimator: unknown key; here it is algorithm.kl.estimator",
                "algo.advantage: unknown key; here it is algorithm.advantage",
                "algo.advantage.estimator: unknown key; here it is algorithm.advantage",
                "algo.advantage.gamma: unknown key; here it is algorithm.gamma",
            ],
        ),
        # What is no section here says by itself what becomes of its keys.
        (
            "custom_reward_function={path: x.py, name: f}",
            ["custom_reward_function: unknown key; here it is reward.name"],
        ),
    ],
)
def test_a_section_that_has_a_name_here_comes_before_its_keys(
    make_config: MakeConfig, given: str, expected: list[str]
) -> None:
    """Of the keys, those are left out that have no name here: where to look for them has been said."""
    assert problems_of(make_config(), given) == expected


@pytest.mark.parametrize(
    ("given", "key", "name"),
    [
        ("data.seed=1", "data.seed", "seed"),
        ("actor.model=x", "actor.model", "model"),
        ("model.name=x", "model.name", "name"),
    ],
)
def test_a_key_of_the_top_level_is_sent_there(make_config: MakeConfig, given: str, key: str, name: str) -> None:
    assert problems_of(make_config(), given)[0] == f"{key}: unknown key; write '{name}' at the top of the file"


NO_JUDGE = (
    "no reward model judges answers here: rewards are functions (reward.name); critic.path starts a critic from one"
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("rollout.name=vllm", ["rollout.name: unknown key; the engine is always SGLang; remove it"]),
        (
            "actor_rollout_ref.rollout={name: vllm, n: 4}",
            [
                "actor_rollout_ref.rollout.name: unknown key; the engine is always SGLang; remove it",
                "actor_rollout_ref.rollout.n: unknown key; here it is rollout.samples_per_prompt",
            ],
        ),
        ("ray_init.num_cpus=1", ["ray_init: unknown key; there is no Ray here; remove it"]),
        ("async_train=true", ["async_train: unknown key; rollout and training take turns here; remove it"]),
        ("trainer.nnodes=1", ["trainer.nnodes: unknown key; torchrun says how many ranks there are; remove it"]),
        (
            "actor_rollout_ref.rollout.multi_turn.enable=true",
            ["actor_rollout_ref.rollout.multi_turn: unknown key; an answer is one turn here; remove it"],
        ),
        # All that such a section holds goes with it, also what has a name here.
        ("reward_model={enable: true, model: {path: x}}", [f"reward_model: unknown key; {NO_JUDGE}"]),
        ("reward_model.micro_batch_size=1", [f"reward_model: unknown key; {NO_JUDGE}"]),
        # Not the model that is trained.
        ("critic.model={path: x, a: 1}", ["critic.model: unknown key; here it is critic.path"]),
        ("actor_rollout_ref.model.path=x", ["actor_rollout_ref.model.path: unknown key; did you mean model.path?"]),
    ],
)
def test_the_sections_around_a_key_decide_what_becomes_of_it(
    make_config: MakeConfig, given: str, expected: list[str]
) -> None:
    assert problems_of(make_config(), given) == expected


@pytest.mark.parametrize(
    "key", ["ray_int", "trainer", "enable", "reward_manager", "model_parallel", "game", "data.truncation"]
)
def test_the_short_names_of_the_top_level_are_not_guessed(make_config: MakeConfig, key: str) -> None:
    (line,) = problems_of(make_config(), f"{key}=1")
    meant = line.partition("did you mean ")[2].partition("?")[0]
    assert not {one.rpartition(".")[2] for one in meant.split(" or ")} & RunConfig.model_fields.keys()


@pytest.mark.parametrize(
    ("key", "meant"), [("trian", "train"), ("modle", "model"), ("names", "name"), ("evals", "eval")]
)
def test_a_slip_of_the_hand_at_the_top_level_is_seen(make_config: MakeConfig, key: str, meant: str) -> None:
    assert problems_of(make_config(), f"{key}=1") == [f"{key}: unknown key; did you mean {meant}?"]


def keys_in_the_docs() -> list[str]:
    """The keys that stand by themselves in the first column of docs/migration.md; what follows `key`: are values."""
    text = (Path(__file__).parents[3] / "docs" / "migration.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    keys = [re.sub(r"\[.*?\]", "", cell).split("`:")[0] + "`" for cell in cells if not cell.startswith(" ...")]
    found = {key for cell in keys for key in re.findall(r"`(?:--)?([a-z][a-z_0-9.]*)`", cell)}
    assert len(found) > 90
    return sorted(found - {"rollout.val_kwargs"})  # that by itself means nothing: its keys have answers


@pytest.mark.parametrize("key", keys_in_the_docs())
def test_every_key_in_the_docs_has_an_answer(make_config: MakeConfig, key: str) -> None:
    if not any(key == ".".join(ours) for ours in _all_paths()):
        assert re.search(": unknown key; .*(here|did you mean )", problems_of(make_config(), f"{key}=1")[-1])


@pytest.mark.parametrize("name", ["SAPO", "luspo", "gmpo", "geo_mean", "clip_cov", "kl_cov", "dppo_kl", "dppo_tv"])
def test_a_loss_that_is_not_here_is_not_taken_for_one_that_is_spelt_like_it(name: str) -> None:
    assert other_libraries.name_elsewhere("algorithm.policy_loss", name) == (
        "there is none like it here; use cispo, gspo, ppo_clip or reinforce, or 'package.module:function'"
    )


@pytest.mark.parametrize("name", ["GDPO", "grpo_passk", "optimal_token_baseline", "vtrace"])
def test_an_advantage_that_is_not_here_is_not_taken_for_one_that_is_spelt_like_it(name: str) -> None:
    assert other_libraries.name_elsewhere("algorithm.advantage", name) == (
        "there is none like it here; use gae, gpg, grpo, opo, reinforce_pp, reinforce_pp_baseline, remax or rloo, or "
        "'package.module:function'"
    )


def test_what_is_named_instead_is_all_there_is() -> None:
    assert set(other_libraries.ADVANTAGES) == set(TABLE["advantage"])
    assert set(other_libraries.LOSSES) == set(TABLE["policy_loss"])


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
