"""A user's rewards, which lie in the working directory of the test runs."""

import json
import os
import time
from pathlib import Path


def note_fault():
    Path("fault").write_text(str(time.time()))


def small_digits(answer):
    return sum(letter < "5" for letter in answer.response) / 6


def recorded_small_digits(answer):
    with open(f"answers_{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps({"prompt": answer.prompt, "token_ids": answer.token_ids}) + chr(10))
    return small_digits(answer)


def constant(answer):
    return 0.25


def raises_on_one(answer):
    if answer.row["number"] == 5:
        note_fault()
        raise RuntimeError("the fifth row is judged by nobody")
    return 0.0
