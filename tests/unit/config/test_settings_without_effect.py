"""Settings that nothing reads or that authors would not use are warned of; other libraries' names are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlmegatron.algorithms.table import TABLE
from rlmegatron.config.algorithm_rules import algorithm_problems
from rlmegatron.config.load import ConfigError, dump, load
from rlmegatron.config.rules import problems, warnings

MakeConfig = Callable[..., Path]

PRESETS = Path(__file__).parents[3] / "yaml_configs"
DAPO = "reward={name: combine, args: {exact_answer: 1, overlong: 1, overlong.max_tokens: 6, overlong.buffer_tokens: 2}}"
SAMPLING = "rollout.dynamic_sampling.enabled=true"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.kl.coef=0.04"], "algorithm.kl.coef: 0.04 has no effect while algorithm.kl.where is 'none'"),
        (
            ["algorithm.kl={where: loss, horizon: 500}"],
            "algorithm.kl.horizon: 500 has no effect while algorithm.kl.target is null",
        ),
        (
            ["algorithm.importance.mode=mask"],
            "algorithm.importance.mode: 'mask' has no effect while algorithm.importance.level is 'none'",
        ),
        (
            ["algorithm.importance={level: token, low: 0.1}"],
            "algorithm.importance.low: 0.1 has no effect while algorithm.importance.mode is 'truncate'",
        ),
        (
            ["rollout.dynamic_sampling.on_shortage=train"],
            "rollout.dynamic_sampling.on_shortage: 'train' has no effect while rollout.dynamic_sampling.enabled is "
            "false",
        ),
        (
            ["algorithm={advantage: rloo, normalize_std: false}"],
            "algorithm.normalize_std: false has no effect on advantage 'rloo'",
        ),
        (["algorithm.lam=0.5"], "algorithm.lam: 0.5 has no effect on advantage 'grpo'"),
        (
            ["algorithm={policy_loss: reinforce, clip_high: 0.28}"],
            "algorithm.clip_high: 0.28 has no effect on policy_loss 'reinforce'",
        ),
        (["algorithm.value_clip=null"], "algorithm.value_clip: null has no effect without a critic"),
        (["critic.optimizer.lr=1e-5"], "critic.optimizer: has no effect without a critic"),
        (["eval.samples=4"], "eval.samples: 4 has no effect without eval.sets"),
        (
            ["train.max_kl=0.01", "train.mini_batches=1"],
            "train.max_kl: 0.01 has no effect with one optimizer step a batch (train.mini_batches x train.epochs), "
            "before which the policy has not moved",
        ),
        (
            ["algorithm.advantage=opo", "train.epochs=2"],
            "algorithm.advantage: 'opo' has the best baseline for exactly one optimizer step a batch, not for 2 "
            "(train.mini_batches x train.epochs)",
        ),
        (
            ["algorithm={advantage: gpg, policy_loss: reinforce, kl: {where: loss}}"],
            "algorithm.kl.where: 'loss', where the authors of 'gpg' use 'none'",
        ),
        (
            ["algorithm.advantage=gpg", "train.epochs=2"],
            "algorithm.policy_loss: 'ppo_clip', where the authors of 'gpg' use 'reinforce'",
        ),
        (
            ["reward.on_error=score", "reward.error_score=0.5"],
            "reward.error_score: 0.5 is at least eval.accuracy_threshold (0.5): answers whose judgement failed count "
            "as correct",
        ),
        (["eval.temperature=0.6"], "eval.temperature: 0.6 has no effect while eval.samples is 0"),
        (["eval.top_p=0.9"], "eval.top_p: 0.9 has no effect while eval.samples is 0"),
        (
            ["actor.optimizer.min_lr=1e-7"],
            "actor.optimizer.min_lr: 1e-07 has no effect while actor.optimizer.schedule is 'constant'",
        ),
        (
            ["algorithm.advantage=gae", "critic.optimizer.min_lr=1e-7"],
            "critic.optimizer.min_lr: 1e-07 has no effect while critic.optimizer.schedule is 'constant'",
        ),
        (["reward.error_score=-1"], "reward.error_score: -1 has no effect while reward.on_error is 'stop'"),
        (
            ["checkpoint={export: false, export_dtype: fp32}"],
            "checkpoint.export_dtype: 'fp32' has no effect while checkpoint.export is false",
        ),
        (
            ["eval={sets: {a: a.jsonl}, every: 11}"],
            "eval.every: 11 is more than train.steps (10): the policy is evaluated only at the start and the end",
        ),
        (
            ["eval={sets: {a: a.jsonl}, every: 11, at_start: false}"],
            "eval.every: 11 is more than train.steps (10): the policy is evaluated only at the end",
        ),
        (
            ["checkpoint.every=11"],
            "checkpoint.every: 11 is more than train.steps (10): the run is saved only at its end",
        ),
        (
            ["algorithm={policy_loss: gspo, clip_low: 3e-4, clip_high: 4e-4, aggregation: token_mean}"],
            "algorithm.aggregation: 'token_mean' weighs the ratios of 'gspo' by the lengths of their answers, where "
            "its authors use 'seq_mean_token_mean'",
        ),
        (
            ["algorithm.advantage=remax", SAMPLING],
            "rollout.dynamic_sampling.enabled: true drops groups whose rewards are equal, from which "
            "algorithm.advantage 'remax' would learn: it does not compare within a group",
        ),
        (
            ["reward={name: overlong, args: {max_tokens: 4096, buffer_tokens: 512}}"],
            "reward.args.max_tokens: 4096 charges answers above 3584 tokens, but none is longer than "
            "rollout.max_new_tokens (6): the penalty is always 0",
        ),
    ],
)
def test_a_setting_that_does_nothing_is_warned_of(make_config: MakeConfig, overrides: list[str], expected: str) -> None:
    assert warnings(load(make_config(), overrides), world_size=None, card=None) == [expected]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [DAPO, SAMPLING, "rollout.dynamic_sampling.by=exact_answer"],
        ["algorithm={advantage: gae, lam: 0.9, value_clip: null}", "critic.optimizer.lr=1e-5"],
        ["algorithm={advantage: reinforce_pp, gamma: 0.9, kl: {where: reward, estimator: k1}}"],
        ["eval={sets: {a: a.jsonl}, every: 10, samples: 2, temperature: 0.6, top_p: 0.9}", "checkpoint.every=10"],
        ["actor.optimizer={schedule: cosine, min_lr: 1e-7}", "reward={on_error: score, error_score: -1}"],
        ["checkpoint.export_dtype=fp32", "algorithm={advantage: gpg, policy_loss: reinforce}"],
        # Functions of the user's own may read any of these.
        ["algorithm={advantage: 'a:f', policy_loss: 'a:g', gamma: 0.9, normalize_std: false, dual_clip: 3}"],
    ],
)
def test_settings_that_are_read_are_not_warned_of(
    make_config: MakeConfig, tmp_path: Path, overrides: list[str]
) -> None:
    cfg = load(make_config(), overrides)
    assert (algorithm_problems(cfg), warnings(cfg, world_size=None, card=None)) == ([], [])
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump(cfg))
    assert warnings(load(resolved), world_size=None, card=None) == [], (
        "a resolved config names every key and must not warn either"
    )


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (
            [DAPO, "rollout.dynamic_sampling.by=exact_answr"],
            "the reward 'combine' has no part 'exact_answr'; did you mean 'exact_answer'?",
        ),
        ([DAPO, "rollout.dynamic_sampling.by=zzz"], "has no part 'zzz'; use reward, exact_answer or overlong"),
        (["rollout.dynamic_sampling.by=accuracy"], "the reward 'exact_answer' has no part 'accuracy'; use reward"),
    ],
)
def test_dynamic_sampling_compares_only_parts_that_the_reward_has(
    make_config: MakeConfig, overrides: list[str], hint: str
) -> None:
    (line,) = algorithm_problems(load(make_config(), [*overrides, SAMPLING]))
    assert line.startswith("rollout.dynamic_sampling.by: ")
    assert line.endswith(hint)


def test_parts_of_a_reward_of_the_users_own_are_not_known_before_it_judges(make_config: MakeConfig) -> None:
    own = ["reward={name: 'my.rewards:judge'}", "rollout.dynamic_sampling.by=right"]
    within = [
        "reward={name: combine, args: {'my.rewards:judge': 1}}",
        "rollout.dynamic_sampling.by=my.rewards:judge.right",
    ]
    for overrides in (own, within):
        assert algorithm_problems(load(make_config(), [*overrides, SAMPLING])) == []


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("algorithm.advantage=ppo", "'ppo' is not known; PPO's is 'gae'"),
        ("algorithm.advantage=gspo", "'gspo' is an algorithm.policy_loss; its advantage is 'grpo'"),
        ("algorithm.policy_loss=grpo", "'grpo' is an algorithm.advantage; its loss is 'ppo_clip'"),
        ("algorithm.advantage=drgrpo", "Dr. GRPO's is 'grpo' with normalize_std: false"),
        ("algorithm.advantage=dr.grpo", "Dr. GRPO's is 'grpo' with normalize_std: false"),
        ("algorithm.advantage=Dr-GRPO", "Dr. GRPO's is 'grpo' with normalize_std: false"),
        ("algorithm.advantage=group_norm", "OpenRLHF's 'group_norm' is 'grpo'"),
        ("algorithm.advantage=GRPO", "'GRPO' is not known; did you mean 'grpo'?"),
        ("algorithm.advantage=REINFORCE++", "did you mean 'reinforce_pp'?"),
        ("algorithm.policy_loss=reinforce_pp", "'reinforce_pp' is an algorithm.advantage; its loss is 'ppo_clip'"),
        ("algorithm.policy_loss=reinforce++", "'reinforce_pp' is an algorithm.advantage; its loss is 'ppo_clip'"),
        (
            "algorithm.policy_loss=reinforce_plus_plus",
            "'reinforce_pp' is an algorithm.advantage; its loss is 'ppo_clip'",
        ),
        ("algorithm.policy_loss=vanilla", "verl's 'vanilla' is 'ppo_clip'"),
        ("algorithm.policy_loss=PPO-Clip", "did you mean 'ppo_clip'?"),
        ("algorithm.policy_loss=zzz", "use cispo, gspo, ppo_clip or reinforce, or 'package.module:function'"),
        ("algorithm.policy_loss=dapo", "what makes it DAPO is in yaml_configs/quickstart_dapo.yaml"),
    ],
)
def test_a_name_of_another_library_is_answered_with_ours(make_config: MakeConfig, override: str, hint: str) -> None:
    known = {f"algorithm.{kind}": names for kind, names in TABLE.items()}
    (line,) = problems(load(make_config(), [override]), world_size=None, card=None, known=known)
    assert hint in line


def test_a_number_that_is_not_finite_is_reported_once(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        load(make_config(), ["algorithm.clip_high=.nan", "algorithm.lam=2"])
    assert caught.value.problems == (
        "algorithm.clip_high: nan is not allowed; use a finite number (command line)",
        "algorithm.lam: 2 is not allowed; use a number of at least 0 and at most 1 (command line)",
    )


def test_no_warm_up_of_the_learning_rate_is_never_too_long(make_config: MakeConfig) -> None:
    cfg = load(make_config(), ["algorithm.advantage=gae", "critic.warmup_steps=10", "train.steps=10"])
    assert warnings(cfg, world_size=None, card=None) == [
        "critic.warmup_steps: 10 of 10 steps leave none that updates the policy"
    ]


@pytest.mark.parametrize("name", ["", "../train", "/tmp/x", "a b"])
def test_a_set_of_evaluation_has_a_name_that_may_be_a_directory(make_config: MakeConfig, name: str) -> None:
    cfg = load(make_config(), [f"eval.sets={{good-1.2: a.jsonl, '{name}': a.jsonl}}"])
    assert algorithm_problems(cfg) == [
        f"eval.sets: {name!r} cannot name a set; use letters, digits, '.', '_', '-', first a letter or digit"
    ]
