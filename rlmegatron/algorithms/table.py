"""Owns the names of the algorithms: what a configuration may call each kind of piece, and what a piece may ask for.

In: a kind and a name, or 'package.module:function'; out: a `Piece` whose signature was checked. Must never import
torch at its top, so that names can be checked without loading it; a new piece is a function and one line here.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TABLE: dict[str, dict[str, str]] = {
    "advantage": {
        "grpo": "rlmegatron.algorithms.group:grpo",
        "rloo": "rlmegatron.algorithms.group:rloo",
        "opo": "rlmegatron.algorithms.group:opo",
        "gpg": "rlmegatron.algorithms.group:gpg",
        "reinforce_pp_baseline": "rlmegatron.algorithms.group:reinforce_pp_baseline",
        "remax": "rlmegatron.algorithms.remax:remax",
        "reinforce_pp": "rlmegatron.algorithms.reward_to_go:reinforce_pp",
        "gae": "rlmegatron.algorithms.gae:gae",
    },
    "policy_loss": {
        "ppo_clip": "rlmegatron.algorithms.policy_loss:ppo_clip",
        "gspo": "rlmegatron.algorithms.policy_loss:gspo",
        "cispo": "rlmegatron.algorithms.policy_loss:cispo",
        "reinforce": "rlmegatron.algorithms.policy_loss:reinforce",
    },
    "value_loss": {
        "clipped_value": "rlmegatron.algorithms.value_loss:clipped_value",
    },
}
"""Kind of piece -> name -> function. Paths rather than functions: see the module docstring."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way a kind of piece is called: by keyword, with the `required` inputs and any of the `optional` ones."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]

    @property
    def offered(self) -> tuple[str, ...]:
        """Every input that a function of this form may take."""
        return self.required + self.optional


COSTLY = frozenset({"values", "greedy_rewards"})
"""Inputs that a run makes only for who names them: a critic's values, and a further answer to every prompt."""
NOTHING_NEAR = "."
_SHORT = 4
"""Longest name in which another letter makes another word, as in 'lam' and 'lag', rather than a slip."""
PER_SAMPLE = "per_sample"
PER_TOKEN = "per_token"

FORMS: dict[str, tuple[Form, ...]] = {
    "advantage": (
        # Called once with the whole global batch; returns [N].
        Form(PER_SAMPLE, ("rewards",), ("group_ids", "lengths", "greedy_rewards", "normalize_std")),
        # Called with the sequences of one rank; returns (advantages [T], returns [T]).
        Form(PER_TOKEN, ("token_rewards", "mask", "cu_seqlens"), ("values", "gamma", "lam")),
    ),
    "policy_loss": (
        Form(
            PER_TOKEN,
            ("logp", "advantages", "weights"),
            ("old_logp", "mask", "cu_seqlens", "clip_low", "clip_high", "dual_clip"),
        ),
    ),
    "value_loss": (Form(PER_TOKEN, ("values", "returns", "weights"), ("old_values", "value_clip")),),
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A function of the table or of the user, and the inputs it takes out of those that its form offers."""

    kind: str
    name: str
    form: Form
    function: Callable[..., Any]
    inputs: frozenset[str]

    def __call__(self, **offered: Any) -> Any:
        """Call the function with its `inputs`, which `offered` must hold; what else the form offers is left out."""
        foreign, absent = offered.keys() - set(self.form.offered), self.inputs - offered.keys()
        assert not foreign and not absent, f"{self.kind} {self.name!r}: foreign {foreign}, absent {absent}"
        return self.function(**{key: value for key, value in offered.items() if key in self.inputs})


def resolve(kind: str, name: str) -> Piece:
    """The piece called `name`; kinds are the keys of `TABLE`.

    Raises ValueError for an unknown name, a module or function that is not there, and a signature that does not fit,
    each with what would fit.
    """
    module_name, _, function_name = _path(kind, name).partition(":")
    where = f"{kind} {name!r}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{where}: cannot import {module_name!r}: {error}; is it on PYTHONPATH?") from error
    members = vars(module)
    if not callable(members.get(function_name)):
        near = _near(function_name, [key for key, member in members.items() if callable(member)])
        raise ValueError(f"{where}: module {module_name!r} has no function {function_name!r}{near}")
    function = members[function_name]
    form, inputs = _fit(kind, where, function)
    return Piece(kind, name, form, function, inputs)


def _path(kind: str, name: str) -> str:
    assert kind in TABLE, f"no kind {kind!r} in the table; there are {', '.join(TABLE)}"
    if name in TABLE[kind]:
        return TABLE[kind][name]
    module_name, colon, function_name = name.partition(":")
    if colon and function_name.isidentifier() and all(part.isidentifier() for part in module_name.split(".")):
        return name
    known = ", ".join(sorted(TABLE[kind]))
    near = _near(name, list(TABLE[kind]))
    raise ValueError(f"{kind} {name!r}: unknown name{near} Use {known}, or 'package.module:function'")


def _fit(kind: str, where: str, function: Callable[..., Any]) -> tuple[Form, frozenset[str]]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        kind_of = type(function).__name__
        raise ValueError(f"{where}: is a {kind_of} whose parameters Python cannot tell; use a 'def'") from None
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise ValueError(f"{where}: takes positional-only parameters, but it is called by keyword")
    form = max(FORMS[kind], key=lambda form: len(named & set(form.offered)))
    missing = [] if open_ended else [key for key in form.required if key not in named]
    if missing:
        forms = " or ".join(", ".join(form.required) for form in FORMS[kind])
        raise ValueError(f"{where}: must take the parameters {forms}; it lacks {', '.join(missing)}")
    own = {p.name for p in parameters if p.default is not p.empty}
    for key in sorted(named - set(form.offered)):
        near = _mistyped(key, set(form.offered) - named) if key in own else _near(key, list(form.offered))
        if key not in own or near != NOTHING_NEAR:
            raise ValueError(f"{where}: takes {key!r}, which nobody passes{near} It may take {', '.join(form.offered)}")
    inputs = named & set(form.offered)
    return form, frozenset(inputs | set(form.offered) - COSTLY if open_ended else inputs)


def _mistyped(key: str, untaken: set[str]) -> str:
    """As `_near`, for a parameter with a default, which may be called anything but an input misspelt.

    untaken: the inputs that the function does not name itself; beside 'weights', 'weight' is meant as it is.
    """
    meant = [name for name in sorted(untaken) if _is_one_slip_from(key, name)]
    return f"; did you mean {meant[0]!r}?" if meant else NOTHING_NEAR


def _is_one_slip_from(word: str, meant: str) -> bool:
    """Whether one character is too few, too many or another, or two neighbours are swapped."""
    shorter = min(len(word), len(meant))
    same = next((at for at in range(shorter) if word[at] != meant[at]), shorter)
    given, wanted = word[same:], meant[same:]
    missing, added = given == wanted[1:], given[1:] == wanted
    replaced = given[1:] == wanted[1:] and len(meant) > _SHORT
    swapped = given[:2] == wanted[1::-1] and given[2:] == wanted[2:]
    return missing or added or replaced or swapped


def _near(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else NOTHING_NEAR
