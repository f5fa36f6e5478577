"""Names resolve to functions whose signatures were checked, and every mistake says what would be right."""

import subprocess
import sys

import pytest
import torch

from rlmegatron.algorithms.gae import gae
from rlmegatron.algorithms.group import grpo
from rlmegatron.algorithms.table import FORMS, PER_SAMPLE, PER_TOKEN, TABLE, resolve
from rlmegatron.config.advantage_traits import TRAITS


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    def write(source):
        name = f"user_algorithms_{abs(hash(str(tmp_path)))}"
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in TABLE for name in TABLE[kind]])
def test_every_name_in_the_table_resolves(kind, name):
    piece = resolve(kind, name)
    assert callable(piece.function)
    assert piece.inputs <= set(piece.form.offered)
    assert f"{piece.function.__module__}:{piece.function.__name__}" == TABLE[kind][name]


def test_the_form_says_how_an_advantage_is_called():
    assert resolve("advantage", "grpo").form.name == PER_SAMPLE
    assert resolve("advantage", "gae").form.name == PER_TOKEN
    assert "values" in resolve("advantage", "gae").inputs
    assert "values" not in resolve("advantage", "grpo").inputs


def test_what_a_configuration_knows_of_an_advantage_is_what_its_function_takes():
    assert TRAITS.keys() == TABLE["advantage"].keys()
    for name, traits in TRAITS.items():
        inputs = resolve("advantage", name).inputs
        assert traits.uses_values == ("values" in inputs), name
        assert traits.uses_greedy == ("greedy_rewards" in inputs), name
        assert (traits.uses_group or traits.uses_greedy) == ("group_ids" in inputs), name


def test_a_piece_takes_what_it_needs_of_what_is_offered():
    rewards, group_ids = torch.tensor([0.0, 1.0]), torch.tensor([0, 0])
    piece = resolve("advantage", "grpo")
    expected = grpo(rewards, group_ids, normalize_std=False)
    assert torch.equal(piece(rewards=rewards, group_ids=group_ids, normalize_std=False), expected)


def test_a_users_function_may_leave_inputs_out(user_module):
    name = user_module(
        "def reinforce(*, logp, advantages, weights):\n    return -(weights * advantages * logp).sum()\n"
    )
    piece = resolve("policy_loss", f"{name}:reinforce")
    one = torch.ones(1)
    loss = piece(logp=-2 * one, advantages=3 * one, weights=one, old_logp=one, clip_low=0.2, clip_high=0.2)
    assert loss.item() == 6.0


def test_a_users_function_with_kwargs_gets_everything_that_costs_nothing(user_module):
    name = user_module(
        "def loss(**inputs):\n    return sorted(inputs)\n"
        "def advantage(rewards, **inputs): ...\n"
        "def with_values(token_rewards, values, **inputs): ...\n"
    )
    offered = dict.fromkeys(FORMS["policy_loss"][0].offered, 0)
    assert resolve("policy_loss", f"{name}:loss")(**offered) == sorted(offered)
    assert resolve("advantage", f"{name}:advantage").inputs == {"rewards", "group_ids", "lengths", "normalize_std"}
    assert "values" in resolve("advantage", f"{name}:with_values").inputs


def test_a_users_function_may_have_parameters_of_its_own_with_a_default(user_module):
    name = user_module("def f(rewards, *, tolerance=0.5):\n    return rewards + tolerance\n")
    piece = resolve("advantage", f"{name}:f")
    assert piece.inputs == {"rewards"}
    assert piece(rewards=torch.ones(1), group_ids=torch.zeros(1)).item() == 1.5


@pytest.mark.parametrize(
    ("kind", "taken", "own"),
    [
        ("policy_loss", "logp, advantages, weights", ["clip", "weight", "clip_ratio_c", "advantage_floor", "eps"]),
        ("policy_loss", "logp, advantages, weights, dual_clip, **rest", ["dual_clip2", "clip_lower", "task"]),
        ("advantage", "rewards", ["reward", "reward_scale", "normalize", "min_length", "greedy_weight"]),
        ("advantage", "token_rewards, mask, cu_seqlens, gamma", ["gamma2", "lag", "lim", "value_scale"]),
        ("value_loss", "values, returns, weights", ["value", "value_scale", "clip", "clip_range"]),
    ],
)
def test_a_parameter_with_a_default_may_resemble_an_input(user_module, kind, taken, own):
    *inputs, last = taken.split(", ")
    first, rest = (inputs, f", {last}") if last.startswith("**") else ([*inputs, last], "")
    parameters = ", ".join([*first, *(f"{name}=0.5" for name in own)])
    name = user_module(f"def f({parameters}{rest}): ...\n")
    assert not resolve(kind, f"{name}:f").inputs & set(own)


def slips_of(word):
    """A character dropped, doubled, replaced (but for short names), or swapped with the next; but for the same word."""
    places = range(len(word))
    dropped = {word[:at] + word[at + 1 :] for at in places}
    doubled = {word[: at + 1] + word[at:] for at in places}
    replaced = {word[:at] + "q" + word[at + 1 :] for at in places if len(word) > 4}
    swapped = {word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :] for at in places}
    return (dropped | doubled | replaced | swapped) - {word}


@pytest.mark.parametrize(
    ("kind", "form", "meant"), [(kind, form, name) for kind in FORMS for form in FORMS[kind] for name in form.optional]
)
def test_a_slip_in_the_name_of_an_input_is_refused_even_with_a_default(user_module, kind, form, meant):
    slips = {f"f{number}": slip for number, slip in enumerate(sorted(slips_of(meant)))}
    taken = ", ".join(form.required)
    name = user_module("".join(f"def {function}({taken}, {slip}=None): ...\n" for function, slip in slips.items()))
    for function, slip in slips.items():
        with pytest.raises(ValueError, match=f"takes '{slip}', which nobody passes; did you mean '{meant}'"):
            resolve(kind, f"{name}:{function}")


def test_a_users_advantage_that_needs_values_is_told_from_one_that_does_not(user_module):
    name = user_module(
        "def per_token(token_rewards, values, mask, cu_seqlens): ...\ndef per_sample(rewards, group_ids): ...\n"
    )
    assert resolve("advantage", f"{name}:per_token").form.name == PER_TOKEN
    assert resolve("advantage", f"{name}:per_sample").form.name == PER_SAMPLE


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(logp, advantages): ...", "it lacks weights"),
        ("def f(logp, advantages, weights, clip_hgh=1): ...", "takes 'clip_hgh'.*did you mean 'clip_high'"),
        ("def f(logp, advantages, weights, clip): ...", "takes 'clip', which nobody passes; did you mean 'clip_low'"),
        ("def f(advantage=None, **inputs): ...", "takes 'advantage', which nobody passes; did you mean 'advantages'"),
        ("def f(logp, /, advantages, weights): ...", "positional-only"),
        ("def g(logp, advantages, weights): ...", "has no function 'f'"),
        ("f = 3", "has no function 'f'"),
    ],
)
def test_a_signature_that_does_not_fit_is_refused(user_module, source, message):
    name = user_module(source + "\n")
    with pytest.raises(ValueError, match=f"policy_loss '{name}:f': .*{message}"):
        resolve("policy_loss", f"{name}:f")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ppo_clp", "unknown name; did you mean 'ppo_clip'? Use cispo, gspo, ppo_clip, reinforce, or 'package.module:"),
        ("my.module", "unknown name. Use cispo"),
        (":f", "unknown name"),
        ("a b:f", "unknown name"),
        ("no_such_module_here:f", "cannot import 'no_such_module_here'"),
    ],
)
def test_a_name_that_is_not_there_is_refused(name, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        resolve("policy_loss", name)


def test_the_table_is_read_without_torch():
    code = "import sys; from rlmegatron.algorithms.table import TABLE; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_gae_is_called_through_the_table():
    ones, cu_seqlens = torch.ones(2), torch.tensor([0, 2])
    inputs = {"token_rewards": ones, "values": ones, "mask": ones.bool(), "cu_seqlens": cu_seqlens}
    found = resolve("advantage", "gae")(**inputs, gamma=0.5, lam=0.5)
    assert all(torch.equal(a, b) for a, b in zip(found, gae(**inputs, gamma=0.5, lam=0.5), strict=True))
