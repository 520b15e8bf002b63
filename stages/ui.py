"""Open MLflow's page that compares the latest two runs of a stage (`make ui`).

Usage: python -m stages.ui [--port 5000] [--stage NAME]
"""

import argparse
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import webbrowser

from stages import ROOT


def main() -> int:
    from tilerank import tracking
    from tilerank.config import load_settings
    from tilerank.errors import TilerankError

    parser = argparse.ArgumentParser(prog="python -m stages.ui", description=__doc__)
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--stage", help="compare runs of this stage (default: the one that ran last)")
    arguments = parser.parse_args()
    try:
        settings = load_settings(ROOT / "params.yaml")
        page = tracking.comparison_page(ROOT, settings.tracking.experiment, arguments.stage)
    except TilerankError as error:
        print(f"ui: {error}", file=sys.stderr)
        return 1
    address = f"http://127.0.0.1:{arguments.port}"
    command = [sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(arguments.port)]
    command += ["--backend-store-uri", tracking.tracking_uri(ROOT)]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}) as server:
        try:
            for _ in range(120):  # the server needs about 12 s
                if server.poll() is not None:
                    print(f"ui: the server ended with exit code {server.returncode}; is port {arguments.port} taken?")
                    return 1
                try:
                    with urllib.request.urlopen(f"{address}/health", timeout=1):
                        break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.5)
            print(f"\nCompare: {address}/{page}\nStop with Ctrl-C.", flush=True)
            webbrowser.open(f"{address}/{page}")
            return server.wait()
        except KeyboardInterrupt:
            server.terminate()
            return 0


if __name__ == "__main__":
    sys.exit(main())
