"""Rebuild the MLflow store from the records of every commit, so that a fresh clone compares all steps.

Usage: python -m stages.import_history
"""

import sys

from stages import ROOT


def main() -> int:
    from tilerank.errors import TilerankError
    from tilerank.history import import_history
    from tilerank.tracking import tracking_uri

    try:
        imported = import_history(ROOT)
    except TilerankError as error:
        print(f"import_history: {error}", file=sys.stderr)
        return 1
    for reason in imported.skipped:
        print(f"import_history: left out: {reason}", file=sys.stderr)
    print(f"{tracking_uri(ROOT)}: {imported.added} runs added, {imported.kept} kept, {imported.removed} removed")
    for name in imported.experiments:
        print(f"  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
