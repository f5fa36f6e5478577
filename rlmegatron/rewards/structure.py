"""The verifier `format`: the response must consist of the named tagged sections, in order.

In: an `Answer`. Out: 1.0 or 0.0. Must never import torch.
"""

from __future__ import annotations

import re

from rlmegatron.rewards.api import Answer


def tagged_format(
    answer: Answer,
    *,
    sections: str = "think,answer",
    opened: bool = False,
    require_content: bool = True,
    require_stop: bool = False,
) -> float:
    """1.0 if the response is `<think>...</think><answer>...</answer>` and nothing else, as DeepSeek-R1 asks; or 0.0.

    sections: names of the tags in order, separated by commas; each must occur once, with only white space between.
    opened: the prompt already ends with the first opening tag, so the response starts inside the first section.
    require_content: a section of white space only does not count. require_stop: a cut-off answer earns 0.0.
    """
    if require_stop and answer.finish_reason != "stop":
        return 0.0
    names = section_names(sections)
    rest = f"<{names[0]}>{answer.response}" if opened else answer.response
    if any(rest.count(tag) != 1 for name in names for tag in (f"<{name}>", f"</{name}>")):
        return 0.0
    for name in names:
        before, _, rest = rest.partition(f"<{name}>")
        content, closing, rest = rest.partition(f"</{name}>")
        if before.strip() or not closing or (require_content and not content.strip()):
            return 0.0
    return float(not rest.strip())


def section_names(sections: str) -> list[str]:
    """The tag names in 'think,answer'; raises ValueError for an empty, repeated or malformed one."""
    names = [name.strip() for name in sections.split(",")]
    if len(set(names)) != len(names) or not all(re.fullmatch(r"[A-Za-z][\w-]*", name) for name in names):
        raise ValueError(
            f"reward.args.sections: {sections!r} is not allowed; give different tag names separated by commas, "
            f"such as 'think,answer'"
        )
    return names


def check_tagged_format(*, sections: str = "think,answer", **_: object) -> None:
    """Raises ValueError for sections that are not tag names."""
    section_names(sections)
