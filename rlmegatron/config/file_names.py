"""Names by which both the check of a config and a run know files: data by its suffix, a whole checkpoint by its name.

In: a path. Out: which kind it is, or why it is none. Must never look at files.
"""

from __future__ import annotations

import re
from pathlib import PurePath

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet", ".pq")
WHOLE_CHECKPOINT = re.compile(r"step_(\d{6,})")
"""To be matched in full: a checkpoint that is being written has a suffix."""


def suffix_of(path: str) -> str:
    """The suffix of a data file in small letters; ValueError for one that no reader knows."""
    suffix, known = PurePath(path).suffix.lower(), (*JSON_LINES_SUFFIXES, *PARQUET_SUFFIXES)
    if suffix not in known:
        raise ValueError(f"{path} is of an unknown kind; use a file that ends in {', '.join(known)}")
    return suffix
