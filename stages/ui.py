"""Open MLflow (`make ui`): every step of git history, and the latest two runs of a stage compared.

Usage: python -m stages.ui [--port 5000] [--stage NAME]
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import webbrowser

from stages import ROOT


def main() -> int:
    from tilerank import tracking
    from tilerank.errors import TilerankError

    parser = argparse.ArgumentParser(prog="python -m stages.ui", description=__doc__)
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--stage", help="compare runs of this stage (default: the one that ran last)")
    arguments = parser.parse_args()
    try:
        pages = _pages(arguments.stage)
    except TilerankError as error:
        print(f"ui: {error}", file=sys.stderr)
        return 1
    uri = tracking.tracking_uri(ROOT)
    if uri.startswith("http"):
        _show(uri.rstrip("/"), pages)
        return 0
    return _serve(uri, arguments.port, pages)


def _serve(uri: str, port: int, pages: dict[str, str]) -> int:
    """Run MLflow's server on the store until Ctrl-C."""
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", uri]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **quiet}) as server:
        try:
            for _ in range(120):  # the server needs about 12 s
                if server.poll() is not None:
                    print(f"ui: the server ended with exit code {server.returncode}; is port {port} taken?")
                    return 1
                try:
                    with urllib.request.urlopen(f"{address}/health", timeout=1):
                        break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.5)
            _show(address, pages)
            print("Stop with Ctrl-C.", flush=True)
            return server.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            server.terminate()


def _show(address: str, pages: dict[str, str]) -> None:
    print()
    for label, page in pages.items():
        print(f"{label}: {address}/{page}", flush=True)
    webbrowser.open(f"{address}/{pages.get('Compare') or next(iter(pages.values()))}")


def _pages(stage: str | None) -> dict[str, str]:
    """Label -> address below the server's."""
    from tilerank import history, tracking
    from tilerank.config import load_settings
    from tilerank.errors import TilerankError

    settings = load_settings(ROOT / "params.yaml")
    pages = {}
    try:
        history.import_history(ROOT)
        pages = history.pages(ROOT)
    except TilerankError as error:  # a tree without git has runs of its own all the same
        print(f"ui: {error}", file=sys.stderr)
    try:
        pages["Compare"] = tracking.comparison_page(ROOT, settings.tracking.experiment, stage)
    except TilerankError:
        if stage is not None or not pages:
            raise
    return pages


if __name__ == "__main__":
    sys.exit(main())
