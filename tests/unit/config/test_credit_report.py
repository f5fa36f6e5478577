"""What --check says of an algorithm and its evaluation: what tells it from plain GRPO is there, what is off is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlmegatron.config.credit_report import credit_rows, evaluation_rows
from rlmegatron.config.load import load
from rlmegatron.config.model_card import ExpertSizes
from rlmegatron.config.report import check_report
from rlmegatron.models.card import read_model_card

MakeConfig = Callable[..., Path]

REWARD = ("reward", "exact_answer")
AGAINST_GROUP = "grpo, against the 4 answers to the prompt"
CLIPPED = "ppo_clip, ratio clipped to [1 - 0.2, 1 + 0.2]"
GRPO = [
    REWARD,
    ("advantage", f"{AGAINST_GROUP}, over their standard deviation"),
    ("loss", f"{CLIPPED}, token_mean"),
]


def test_plain_grpo_is_three_rows(make_config: MakeConfig) -> None:
    cfg = load(make_config())
    assert credit_rows(cfg) == GRPO
    assert evaluation_rows(cfg) == []


def test_dapo_shows_its_clip_and_what_it_leaves_out(make_config: MakeConfig) -> None:
    dapo = (
        "algorithm={clip_high: 0.28, drop_cut_off: true}",
        "rollout.dynamic_sampling={enabled: true, max_prompts_ratio: 5}",
    )
    agreeing = "prompts whose answers agree in 'reward', redrawn: at most 80 tried a step, then "
    assert credit_rows(load(make_config(), dapo)) == [
        *GRPO[:2],
        ("loss", "ppo_clip, ratio clipped to [1 - 0.2, 1 + 0.28], token_mean"),
        ("left out", agreeing + "the run stops"),
        ("", "answers cut off at 6 tokens"),
    ]
    going_on = credit_rows(load(make_config(), [*dapo, "rollout.dynamic_sampling.on_shortage=train"]))
    assert ("left out", agreeing + "those found are trained on") in going_on


def test_dr_grpo_shows_no_deviation_and_what_sums_are_divided_by(make_config: MakeConfig) -> None:
    dr_grpo = ["algorithm={normalize_std: false, aggregation: seq_mean_token_sum_norm}"]
    for overrides, constant in ((dr_grpo, 6), ([*dr_grpo, "algorithm.aggregation_constant=1024"], 1024)):
        assert credit_rows(load(make_config(), overrides)) == [
            REWARD,
            ("advantage", AGAINST_GROUP),
            ("loss", f"{CLIPPED}, seq_mean_token_sum_norm over {constant}"),
        ]


def test_remax_shows_the_greedy_answers_that_it_generates_besides(make_config: MakeConfig) -> None:
    overrides = [
        "algorithm={advantage: remax, policy_loss: reinforce, kl: {where: reward, estimator: k1, coef: 0.01}}",
        "rollout.samples_per_prompt=1",
    ]
    assert credit_rows(load(make_config(), overrides)) == [
        REWARD,
        ("advantage", "remax, against the greedy answer to the prompt (16 more a step)"),
        ("loss", "reinforce, token_mean"),
        ("KL", "k1 x 0.01 in the reward"),
    ]


def test_ppo_shows_its_critic_and_an_adapted_divergence(make_config: MakeConfig) -> None:
    overrides = [
        "algorithm={advantage: gae, gamma: 0.99, dual_clip: 3, entropy_coef: 0.01}",
        "algorithm.kl={where: reward, coef: 0.05, target: 0.1}",
        "critic.normalize_returns=true",
        "reward={clip: [-1, 5], whiten: true}",
        "train.max_kl=0.02",
    ]
    assert credit_rows(load(make_config(), overrides)) == [
        ("reward", "exact_answer, cut to [-1, 5], whitened over the step"),
        ("advantage", "gae, against the critic's values, gamma 0.99, lambda 0.95, whitened over the step"),
        ("loss", f"{CLIPPED}, to 3 where the advantage is negative, token_mean, entropy bonus x 0.01"),
        ("value loss", "clipped_value, values clipped to +- 0.2 of the old ones, returns normalized over the run"),
        ("KL", "k3 x 0.05 in the reward, adapted to 0.1 per token within 10,000 samples"),
        ("left out", "a step's further policy updates, once one shows a divergence above 0.02"),
    ]


@pytest.mark.parametrize(
    ("importance", "text"),
    [
        ("{level: token}", "probability ratio learner / engine of each token, cut at 2"),
        ("{level: sequence, high: 3}", "probability ratio learner / engine of each answer, cut at 3"),
        (
            "{level: geometric, mode: mask}",
            "probability ratio learner / engine of each answer (geometric mean), only within [0.5, 2]",
        ),
    ],
)
def test_a_correction_for_the_engine_is_shown_with_its_bounds(
    make_config: MakeConfig, importance: str, text: str
) -> None:
    assert credit_rows(load(make_config(), [f"algorithm.importance={importance}"])) == [*GRPO, ("importance", text)]


def test_pieces_of_the_users_own_are_named_without_guesses(make_config: MakeConfig) -> None:
    rows = credit_rows(load(make_config(), ["algorithm.advantage=mine:credit", "reward.name=mine:judge"]))
    assert rows[:2] == [("reward", "mine:judge"), ("advantage", "mine:credit")]


def test_pieces_of_the_users_own_are_shown_with_what_they_take(make_config: MakeConfig) -> None:
    overrides = ["algorithm={advantage: 'mine:credit', policy_loss: 'mine:loss', dual_clip: 3}"]
    own = {
        "advantage": ["rewards", "group_ids", "greedy_rewards", "normalize_std"],
        "policy_loss": ["logp", "advantages", "weights", "clip_low", "clip_high", "dual_clip"],
    }
    assert credit_rows(load(make_config(), overrides), own_inputs=own) == [
        REWARD,
        (
            "advantage",
            "mine:credit, given rewards, group_ids, the reward of the greedy answer to the prompt (16 more a step) and "
            "normalize_std true",
        ),
        ("loss", "mine:loss, given logp, advantages, weights, clip_low 0.2, clip_high 0.2 and dual_clip 3, token_mean"),
    ]
    unclipped = credit_rows(load(make_config(), overrides[0:1]), own_inputs={"policy_loss": ["logp"]})
    assert unclipped[2] == ("loss", "mine:loss, given logp, token_mean")


@pytest.mark.parametrize(
    ("moe", "has_bias", "text"),
    [
        ("{}", False, "router replay off, sequence-wise balance loss off"),
        (
            "{router_replay: true, aux_loss_coef: 1e-4}",
            False,
            "router replay on (tokens go to the experts that the engine chose), sequence-wise balance loss x 0.0001",
        ),
        ("{}", True, "router replay off, sequence-wise balance loss off, routing bias frozen"),
        (
            "{bias_update_rate: 1e-3}",
            True,
            "router replay off, sequence-wise balance loss off, routing bias moved by 0.001 after each update",
        ),
    ],
)
def test_a_model_with_experts_shows_how_they_are_chosen_and_balanced(
    make_config: MakeConfig, moe: str, has_bias: bool, text: str
) -> None:
    experts = ExpertSizes(num=8, top_k=2, ffn=64, shared_ffn=0, layers=(0,), has_bias=has_bias)
    assert credit_rows(load(make_config(), [f"moe={moe}"]), experts=experts) == [*GRPO, ("routing", text)]


def test_an_evaluation_shows_its_sets_times_and_answers(make_config: MakeConfig) -> None:
    path = make_config({"eval.sets": {"a": "a.jsonl", "b": "b.parquet"}})
    assert evaluation_rows(load(path)) == [
        ("sets", "a: a.jsonl"),
        ("", "b: b.parquet"),
        ("when", "at the start, at the end"),
        ("answers", "1 greedy"),
        ("correct", "from a reward of 0.5"),
    ]
    often = "eval={at_start: false, every: 5, samples: 6, temperature: 0.6, top_p: 0.9, max_new_tokens: 4}"
    assert evaluation_rows(load(path, [often, "eval.sets={a: a.jsonl}"]))[1:3] == [
        ("when", "every 5 steps, at the end"),
        (
            "answers",
            "1 greedy and 6 sampled at temperature 0.6, top_p 0.9 (avg@6, pass@1, pass@2, pass@4), of at most 4 tokens",
        ),
    ]
    sampled = ["eval={greedy: false, samples: 8, pass_at: [8, 1]}", "eval.sets={a: a.jsonl}"]
    assert ("answers", "8 sampled at temperature 1 (avg@8, pass@1, pass@8)") in evaluation_rows(load(path, sampled))


def test_the_report_has_both_parts(make_config: MakeConfig) -> None:
    cfg = load(make_config({"eval.sets": {"a": "a.jsonl"}}))
    card = read_model_card(cfg.model.path)
    lines = check_report(cfg, world_size=1, world_size_from="from --ranks", card=card).splitlines()
    start = lines.index("credit")
    assert lines[start + 1] == "  reward     exact_answer" and lines[start + 4 : start + 6] == ["", "ranks"]
    assert lines[lines.index("evaluation") + 2] == "  when     at the start, at the end"
