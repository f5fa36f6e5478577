"""A user's policy losses, which lie in the working directory of the test runs: the usual one, with something beside."""

import json
import os
import signal
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from user_rewards import note_fault

from rlmegatron.algorithms.policy_loss import ppo_clip


def raises_on_rank_1(*, logp, old_logp, advantages, weights, clip_low, clip_high):
    if os.environ["RANK"] == "1":
        note_fault()
        raise RuntimeError("rank 1 does not like this batch")
    return ppo_clip(
        logp=logp, old_logp=old_logp, advantages=advantages, weights=weights, clip_low=clip_low, clip_high=clip_high
    )


def kills_its_engine_in_mid_publish(*, logp, old_logp, advantages, weights, clip_low, clip_high):
    """When its first bucket is on its way."""
    if is_first_call_on_rank_0("engine_killed_in_mid_publish"):
        from rlmegatron.weight_sync.buckets import BucketGroup

        pack = BucketGroup._pack

        def kill_and_pack(self, number):
            BucketGroup._pack = pack
            kill_own_engine()
            pack(self, number)

        BucketGroup._pack = kill_and_pack
    return ppo_clip(
        logp=logp, old_logp=old_logp, advantages=advantages, weights=weights, clip_low=clip_low, clip_high=clip_high
    )


def is_first_call_on_rank_0(name):
    done = Path(name)
    if os.environ["RANK"] != "0" or done.exists():
        return False
    done.touch()
    return True


def kill_own_engine():
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of a process that has just ended
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"rlmegatron.rollout.serve" in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def recorded_ppo_clip(*, logp, old_logp, advantages, weights, mask, cu_seqlens, clip_low, clip_high):
    bounds = cu_seqlens.tolist()
    rows = [old_logp[start:stop][mask[start:stop]].tolist() for start, stop in pairwise(bounds)]
    with open(f"old_logp_rank_{os.environ['RANK']}.jsonl", "a") as file:
        file.write(json.dumps(rows) + chr(10))
    return ppo_clip(
        logp=logp, old_logp=old_logp, advantages=advantages, weights=weights, clip_low=clip_low, clip_high=clip_high
    )
