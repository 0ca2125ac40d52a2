"""The prefix index takes the memory that it says: the process's own memory beside the setting."""

import subprocess
import sys

import pytest

MEGABYTES = 24

# Prompts in a process of their own, until twice as many came as fit; prints the memory they took, by the setting.
FILL = """
import gc, random, sys
import psutil
from pdrouter.core.ledger import RankKey
from pdrouter.core.prefix import PrefixIndex

shape, max_bytes = sys.argv[1], int(sys.argv[2]) << 20
chance = random.Random(1)
ranks = [RankKey(f"10.0.0.{number // 8}:30000", number % 8) for number in range(256)]
talks = {}

def blocks(most):
    return tuple(chance.getrandbits(64) - 2**63 for _ in range(chance.randint(1, most)))

def prompt():
    if shape == "short":
        return blocks(4), chance.choice(ranks)
    if shape == "long":
        return blocks(250), chance.choice(ranks)
    key = chance.randrange(1000)
    known, rank = talks.get(key, ((), chance.choice(ranks)))
    if shape == "shared":  # everybody reads the same documents
        talks[key] = known or blocks(60), rank
        return talks[key][0], chance.choice(ranks)
    known = (known if len(known) < 60 else ()) + blocks(4)  # talks of many turns, which change their rank at times
    talks[key] = known, rank if chance.random() < 0.8 else chance.choice(ranks)
    return talks[key]

for _ in range(3000):
    prompt()
gc.collect()
before = psutil.Process().memory_info().rss
index, count, fitting = PrefixIndex(max_bytes), 0, 0
while not index.evictions or count < 2 * fitting:
    index.insert(*prompt())
    count += 1
    fitting = fitting if index.evictions else count
assert index.used_bytes <= max_bytes
gc.collect()
print((psutil.Process().memory_info().rss - before) / max_bytes)
"""


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("shape", ["short", "long", "shared", "talks"])
def test_a_full_index_takes_what_is_set(shape: str) -> None:
    """Within a quarter, whatever prompts and ranks are like."""
    command = [sys.executable, "-c", FILL, shape, str(MEGABYTES)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert 0.75 < float(done.stdout) < 1.25
