"""What a failing rank leaves for torchrun, whose own summary would otherwise say that it knows nothing.

In: one line. Out: the error file that torchrun named in the environment. Must never import torch: the command line
fails before that.
"""

from __future__ import annotations

import json
import os
import time

SEE_REPORT = "see the report above"


def leave_note(line: str) -> None:
    """Let torchrun print `line` for this rank (the format is that of torch.distributed.elastic's ErrorHandler)."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        note = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": note}, file)
