"""Which committed records are stale? Writes metrics/<machine>/STALE.md and the README's line about it.

Usage: python -m stages.records_check [--check]
--check writes nothing and exits with 1 when these two do not tell the truth.
"""

import argparse
import sys

from stages import ROOT


def main() -> int:
    from tilerank import records
    from tilerank.config import load_settings
    from tilerank.errors import TilerankError

    parser = argparse.ArgumentParser(prog="python -m stages.records_check", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when STALE.md or README are untrue")
    arguments = parser.parse_args()
    try:
        machine = load_settings(ROOT / "params.yaml").machine.name
        stale = records.check(ROOT)
        untrue = records.apply(ROOT, machine, stale, write=not arguments.check)
    except TilerankError as error:
        print(f"records_check: {error}", file=sys.stderr)
        return 1
    for record in stale:
        print(f"stale: {record.stage}: {'; '.join(record.reasons)}")
    print(f"{len(stale)} stale records of {machine}")
    if arguments.check and untrue:
        print(f"records_check: untrue: {', '.join(untrue)}; run `make records-check` and commit", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
