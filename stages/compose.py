"""Write params.yaml: what conf/ composes to, byte for byte as `dvc exp run -S` writes it.

Usage: python -m stages.compose [hydra overrides]
"""

import sys

from stages import ROOT


def main(overrides: list[str]) -> int:
    from tilerank.composition import compose_file
    from tilerank.errors import TilerankError

    try:
        compose_file(ROOT / "conf", ROOT / "params.yaml", overrides)
    except TilerankError as error:
        print(f"stages.compose: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
