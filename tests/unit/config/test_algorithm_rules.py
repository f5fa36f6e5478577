"""Rules and warnings of algorithms: each broken one gives exactly its line, which says what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlmegatron.config.algorithm_rules import algorithm_problems, expert_problems
from rlmegatron.config.load import load
from rlmegatron.config.model_card import ExpertSizes
from rlmegatron.config.rules import warnings
from rlmegatron.models.card import read_model_card

MakeConfig = Callable[..., Path]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["rollout.temperature=0"],
            "rollout.temperature: 0 always gives the most likely answer: all answers to a prompt would be equal, and "
            "the policy that drew them has no log-probabilities to learn from; use a number above 0 (evaluation is "
            "greedy by itself)",
        ),
        (
            ["rollout.samples_per_prompt=1", "algorithm.advantage=rloo"],
            "rollout.samples_per_prompt: 1 leaves algorithm.advantage 'rloo' no group to compare with (every advantage "
            "would be 0); use at least 2",
        ),
        (
            ["rollout={samples_per_prompt: 1, dynamic_sampling: {enabled: true}}", "algorithm.advantage=remax"],
            "rollout.dynamic_sampling.enabled: true needs answers to compare, but rollout.samples_per_prompt is 1; use "
            "at least 2",
        ),
        (
            ["critic.normalize_returns=true"],
            "critic.normalize_returns: true is given, but algorithm.advantage 'grpo' trains no critic; remove it, or "
            "use 'gae'",
        ),
        (
            ["critic.enabled=true"],
            "critic.enabled: true is given, but algorithm.advantage 'grpo' has no use for one; remove it",
        ),
        (
            ["critic.enabled=false", "algorithm.advantage=gae"],
            "critic.enabled: false is given, but algorithm.advantage 'gae' needs a critic; remove it",
        ),
        (
            ["critic.warmup_steps=2", "algorithm.advantage=mine:own"],
            "critic.warmup_steps: 2 is given, but algorithm.advantage 'mine:own' trains no critic; remove it, or set "
            "critic.enabled: true",
        ),
        (["reward.clip=[1, 1]"], "reward.clip: [1, 1] is empty; the first bound must be below the second"),
        (
            ["reward.whiten=true", "algorithm.advantage=remax"],
            "reward.whiten: true cannot go with algorithm.advantage 'remax', which compares with the reward of another "
            "answer; use algorithm.whiten, which acts on advantages",
        ),
        (
            ["algorithm.kl.target=0.1"],
            "algorithm.kl.target: 0.1 needs algorithm.kl.where 'reward' or 'loss'; it is 'none'",
        ),
        (
            ["algorithm.kl={where: loss, target: 0.1, coef: 0}"],
            "algorithm.kl.coef: 0 cannot be adapted to algorithm.kl.target (0.1); use a number above 0",
        ),
        (
            ["algorithm.kl={where: loss, target: 0.1, horizon: 12}"],
            "algorithm.kl.horizon: 12 is too short for 64 samples a step, which could turn the weight negative; use at "
            "least 64",
        ),
        (
            ["algorithm.importance={level: token, mode: mask, low: 3, high: 2}"],
            "algorithm.importance.low: 3 leaves no room below 1, the ratio of tokens on which engine and learner "
            "agree; use a number below 1",
        ),
        (
            ["algorithm.importance={level: geometric, high: 0.1}"],
            "algorithm.importance.high: 0.1 is below 1, the ratio of tokens on which engine and learner agree; use at "
            "least 1",
        ),
        (
            ["rollout.dynamic_sampling={enabled: true, by: error}"],
            "rollout.dynamic_sampling.by: 'error' is whether a judgement failed, and no part to compare answers by",
        ),
        (
            ["algorithm.importance={level: token, mode: mask, low: 0.1, high: 0.9}"],
            "algorithm.importance.high: 0.9 leaves no room above 1, the ratio of tokens on which engine and learner "
            "agree; use a number above 1",
        ),
        (
            ["eval={sets: {a: a.jsonl}, greedy: false}"],
            "eval.greedy: false with eval.samples 0 leaves nothing to evaluate; use one of the two, or no eval.sets",
        ),
        (
            ["eval={samples: 4, pass_at: [1, 8, 16]}"],
            "eval.pass_at: 8 or 16 of 4 answers (eval.samples) cannot be drawn; use at most eval.samples",
        ),
        (
            ["moe.router_replay=true", "rollout.engine_args={chunked_prefill_size: -1}"],
            "rollout.engine_args.chunked_prefill_size: -1 cannot go with moe.router_replay: the engine keeps the "
            "experts of one chunk at a time; use a number above 0, or remove it",
        ),
        (
            ["eval.max_new_tokens=100000"],
            "eval.max_new_tokens: 100000 and data.max_prompt_tokens (8) exceed rollout.context_length (14); raise that",
        ),
    ],
)
def test_a_broken_rule_of_an_algorithm_gives_its_one_line(
    make_config: MakeConfig, overrides: list[str], expected: str
) -> None:
    assert algorithm_problems(load(make_config(), overrides)) == [expected]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.top_p=0.9"], "the policy ratio is biased; 1 turns it off"),
        (["rollout.top_k=50"], "the policy ratio is biased; -1 turns it off"),
        (
            ["algorithm={policy_loss: gspo, aggregation: seq_mean_token_mean}"],
            "hardly ever binds for the ratio of a whole answer",
        ),
        (["algorithm.policy_loss=reinforce", "train.mini_batches=2"], "all but the first are off-policy"),
        (["algorithm={policy_loss: cispo, dual_clip: 3}"], "dual_clip: 3 has no effect on policy_loss 'cispo'"),
        (["algorithm.aggregation_constant=7"], "has no effect on aggregation 'token_mean'"),
        (["algorithm.kl={where: loss, estimator: k1}"], "without pulling to the reference"),
        (
            ["reward={name: combine, args: {exact_answer: 1, overlong: -0.5}}"],
            "reward.args.overlong: -0.5 is a bonus on over-long answers",
        ),
        (["reward={name: combine, args: {exact_answer: 0, regex: 0.0}}"], "reward.args: every weight is 0"),
        (
            ["algorithm.clip_high=1.28"],
            "algorithm.clip_high: 1.28 is a distance from 1, not a bound of the ratio, which then may rise to 2.28",
        ),
        (["eval.accuracy_threshold=1.5"], "the reward 'exact_answer' is 0 or 1: no answer counts as correct"),
        (
            ["eval.accuracy_threshold=0", "reward={name: regex, args: {pattern: a}}"],
            "eval.accuracy_threshold: 0, while the reward 'regex' is 0 or 1: every answer counts as correct",
        ),
        (["actor.optimizer.lr=0.02"], "actor.optimizer.lr: 0.02 is far above"),
        (["algorithm.advantage=gae", "critic.optimizer.lr=1"], "critic.optimizer.lr: 1 is far above"),
    ],
)
def test_a_legal_choice_that_is_rarely_meant_is_warned_of(
    make_config: MakeConfig, overrides: list[str], words: str
) -> None:
    (line,) = warnings(load(make_config(), overrides), world_size=None, card=None)
    assert words in line


def test_a_lower_clip_distance_of_1_bounds_nothing(make_config: MakeConfig) -> None:
    assert warnings(load(make_config(), ["algorithm.clip_low=1"]), world_size=None, card=None) == [
        "algorithm.clip_low: 1 is a distance from 1, not a bound of the ratio, which then has no lower bound; 0.2 is "
        "usual"
    ]


def test_a_wider_lower_clip_is_warned_of_where_a_ratio_is_clipped(make_config: MakeConfig) -> None:
    settings = "policy_loss: {}, clip_low: 0.02, clip_high: 0.01, aggregation: seq_mean_token_mean"

    def warned(loss: str) -> list[str]:
        path = make_config()
        return warnings(load(path, [f"algorithm={{{settings.format(loss)}}}"]), world_size=None, card=None)

    for loss in ("ppo_clip", "gspo"):
        (line,) = warned(loss)
        assert line.startswith("algorithm.clip_low: 0.02 is wider than algorithm.clip_high (0.01)")
    for loss in ("cispo", "reinforce", "'my.losses:own'"):
        assert [line for line in warned(loss) if "wider" in line] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm={policy_loss: cispo, clip_low: 1.0, clip_high: 4.0}"],
        ["algorithm={policy_loss: cispo, clip_low: 1.0, clip_high: 0.28}"],
        ["eval.accuracy_threshold=1", "reward.name=numeric_answer"],
        # A sum of weights may be larger than 1, and a function of the user's own anything.
        ["eval.accuracy_threshold=1.5", "reward={name: combine, args: {exact_answer: 2}}"],
        ["eval.accuracy_threshold=-1", "reward.name=my.rewards:judge"],
        ["reward={name: combine, args: {exact_answer: 0, 'my.rewards:judge': 1}}"],
        ["actor.optimizer.lr=0.01"],
    ],
)
def test_choices_that_may_well_be_meant_are_not_warned_of(make_config: MakeConfig, overrides: list[str]) -> None:
    assert warnings(load(make_config(), overrides), world_size=None, card=None) == []


def test_settings_of_experts_need_experts(make_config: MakeConfig) -> None:
    cfg = load(make_config(), ["moe={router_replay: true, bias_update_rate: 0.001}"])
    card = read_model_card(cfg.model.path)
    assert list(expert_problems(cfg, card)) == [
        f"moe.router_replay: true is given, but {card.path} has no experts; remove it",
        f"moe.bias_update_rate: 0.001 is given, but {card.path} has no experts; remove it",
    ]
    sizes = ExpertSizes(num=8, top_k=2, ffn=32, shared_ffn=0, layers=(0, 1), has_bias=False)
    assert list(expert_problems(cfg, replace(card, experts=sizes))) == [
        "moe.bias_update_rate: 0.001 needs a router with a bias, as DeepSeek-V3's; "
        f"{card.path} has none; use 0, or moe.aux_loss_coef"
    ]
    assert list(expert_problems(cfg, replace(card, experts=replace(sizes, has_bias=True)))) == []
