"""The whole pipeline on the embedded data set, in a copied tree: build/quickstart/ (`make quickstart`).

Usage: python -m stages.quickstart [hydra overrides]
"""

import os
import subprocess
import sys
import time

from stages import ROOT

PIPELINE = ("prepare_data", "retrieve", "index_passages", "profile_baseline", "evaluate_quality", "bench_rerank")

# The reference only: a GPU kernel is never timed on a CPU, and compiling all of them takes minutes.
ATTENTION = ("build_kernels@reference", "bench_attention@reference", "integrate_hf")


def _python(folder: str, *arguments: str) -> None:
    environment = dict(os.environ)
    environment["MLFLOW_TRACKING_URI"] = environment.get("MLFLOW_TRACKING_URI") or f"sqlite:///{ROOT / 'mlflow.db'}"
    # DVC runs `python -m stages.<name>`: the interpreter of this environment, whether it is activated or not.
    environment["PATH"] = os.path.dirname(sys.executable) + os.pathsep + environment.get("PATH", "")
    environment.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    code = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, check=False).returncode
    if code != 0:
        print(f"quickstart: `python {' '.join(arguments)}` ended with exit code {code} in {folder}", file=sys.stderr)
        sys.exit(1)


def main(overrides: list[str]) -> None:
    from tilerank.errors import TilerankError
    from tilerank.kernels import library
    from tilerank.machine import device_for
    from tilerank.provenance import source_state, write_source_file
    from tilerank.treecopy import copy_tree

    started = time.monotonic()
    folder = ROOT / "build" / "quickstart"
    try:
        copy_tree(ROOT, folder)
        write_source_file(source_state(ROOT), folder)
    except TilerankError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        sys.exit(1)
    machine = "cpu" if device_for("local") == "cpu" else "auto"
    _python(str(folder), "-m", "stages.compose", "experiment=quickstart", f"machine={machine}", *overrides)
    targets = PIPELINE
    try:
        library.load()
        targets += ATTENTION
        left_out = "GPU kernels: on a GPU, `dvc repro` measures them (README, 'Record your own machine')"
    except TilerankError as error:
        left_out = f"attention, which needs a C++ compiler: {error}"
    _python(str(folder), "-m", "dvc", "repro", *targets)  # says which stage runs: some take minutes
    # Alone: all that it depends on would include the stages left out above.
    _python(str(folder), "-m", "dvc", "repro", "--quiet", "--single-item", "report")
    _python(str(folder), "-m", "stages.show")
    print(f"\nReport: {folder / 'reports' / 'index.html'}")
    print(f"Left out: {left_out}")
    print(f"Runs:   `make ui` compares them in MLflow. Took {time.monotonic() - started:.0f} s.")


if __name__ == "__main__":
    main(sys.argv[1:])
