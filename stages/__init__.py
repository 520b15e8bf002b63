"""Pipeline stages: thin modules, each runnable as ``python -m stages.<name> [hydra overrides]``.

A stage imports the package of its own tree, so that a copied tree runs the copy.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
