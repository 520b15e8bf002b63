"""Record this machine's GPU beside the committed record (`make gpu`): a sanity kernel first, then the whole pipeline.

Usage: python -m stages.gpu [hydra overrides]
The record goes to metrics/$TILERANK_MACHINE/; unless that is set, the GPU's model is its name (t4, rtx-4090).
"""

import os
import subprocess
import sys

from stages import ROOT


def _python(*arguments: str) -> int:
    # DVC runs `python -m stages.<name>`: the interpreter of this environment, whether it is activated or not.
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    environment = os.environ | {"PATH": path, "MLFLOW_DISABLE_TELEMETRY": "true"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=False).returncode


def main(overrides: list[str]) -> int:
    from tilerank.composition import compose_settings
    from tilerank.errors import TilerankError
    from tilerank.machine import describe_machine, name_for
    from tilerank.models import resolve

    gpu = describe_machine(use_cuda=True).gpu
    if gpu is None:
        print("gpu: this machine has no CUDA device that torch can use; `make quickstart` runs here", file=sys.stderr)
        return 1
    if _python("-m", "tilerank.cli", "doctor") != 0:
        print("gpu: nothing is recorded on a machine where the above fails", file=sys.stderr)
        return 1
    machine = os.environ.get("TILERANK_MACHINE") or name_for(gpu)
    os.environ["TILERANK_MACHINE"] = machine
    overrides = ["machine=auto", *overrides]
    try:  # before params.yaml is touched
        resolve(compose_settings(ROOT / "conf", overrides).model, ROOT)
    except TilerankError as error:
        print(f"gpu: {error} (or take another: OVERRIDES=model=ms_marco)", file=sys.stderr)
        return 1
    if _python("-m", "stages.compose", *overrides) != 0:
        return 1
    complete = _python("-m", "dvc", "repro", "--keep-going") == 0
    if not complete:
        # Alone: the stages that it depends on include those that failed.
        _python("-m", "dvc", "repro", "--quiet", "--single-item", "report")
        print("gpu: some stages failed, their messages are above; the record is what the others measured")
    print(f"""
metrics/{machine}/ is the record of this {gpu}. To keep it, on a branch of your own:
    git switch -c {machine}
    git add params.yaml dvc.lock metrics/{machine} README.md docs
    git commit -m "Record the ladder on {machine}"
README and docs show its figures there; `git diff main -- README.md` shows both.""")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
