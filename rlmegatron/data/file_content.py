"""What a data file holds, told by its first bytes, where that is not what its name says.

In: the first bytes of a file. Out: why no reader takes it, and what to do. Must never open a file or import a reader.
"""

from __future__ import annotations

import codecs
import json

HEAD_BYTES = 4096
"""How much of a file is looked at."""

_PARQUET = b"PAR1"
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}


def wrong_content(head: bytes, *, is_jsonl: bool) -> str | None:
    """Why a file that begins with `head` cannot be read as its name says, or None if nothing speaks against it.

    head: the first `HEAD_BYTES` of the file, or all of a shorter one. is_jsonl: whether its name says JSON lines, not
    Parquet. The answer goes behind 'data/train.jsonl: '.
    """
    for magic, packer in _COMPRESSED.items():
        if head.startswith(magic):
            return f"is compressed with {packer}; unpack it first"
    if head.startswith(_PARQUET):
        return "is a Parquet file; name it .parquet" if is_jsonl else None
    encoding = json.detect_encoding(head)
    text = _beginning_of_text(head, encoding)
    if not text.startswith(("{", "[")):
        return None
    if not encoding.startswith("utf-8"):
        return f"is {encoding.upper()[: len('UTF-16')]}; write it as UTF-8"
    if text.startswith("["):
        return "is a JSON array; write one object per line (.jsonl)"
    if _opens_only(text):
        return "is a JSON object over several lines; write one object per line (.jsonl)"
    return None if is_jsonl else "is no Parquet file but looks like JSON lines; name it .jsonl"


def _beginning_of_text(head: bytes, encoding: str) -> str:
    """The text without blanks before it; what is cut or broken is left to the reader, who knows its line."""
    return codecs.getincrementaldecoder(encoding)("replace").decode(head).lstrip()


def _opens_only(text: str) -> bool:
    """Whether the first line is a lone brace."""
    first_line, newline, _ = text.partition("\n")
    return newline == "\n" and first_line.strip() == "{"
