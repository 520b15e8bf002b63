"""Print the records of this tree as a table (the quickstart ends with it).

Usage: python -m stages.show
"""

import sys

from stages import ROOT


def main() -> int:
    from tilerank.config import load_settings
    from tilerank.errors import TilerankError
    from tilerank.report import print_table, read_records

    try:
        settings = load_settings(ROOT / "params.yaml")
        print_table(read_records(ROOT / "metrics" / settings.machine.name))
    except TilerankError as error:
        print(f"show: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
