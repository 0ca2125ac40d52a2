"""The policy study: ``--quick`` prints the aims, without it the tables and pictures of docs/study.md are made anew.

Run: ``make study-quick``, ``make study``.
"""

import argparse
import os
import platform
import sys
import time
from pathlib import Path

from pdrouter.options import router_options
from pdrouter.sim.study.command import run_quick, write_study

sys.path.insert(0, str(Path(__file__).parent))
from _report import provenance

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the aims alone")
    if parser.parse_args().quick:
        print("\n".join(run_quick(router_options)))
        return
    start_s = time.monotonic()
    origin = (
        f"`make study`: {os.cpu_count()} cores, {provenance(DOCS.parent)['cpu']}, Python {platform.python_version()}."
    )
    write_study(router_options, DOCS / "study.md", DOCS / "study", origin)
    print(f"docs/study.md written in {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
