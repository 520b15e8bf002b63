"""`make ui`: the page that compares the latest two runs is served."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request


def test_the_comparison_page_is_served(project) -> None:
    project.check("python -m stages.retrieve retrieval=stub")
    project.check("python -m stages.retrieve retrieval=bm25")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(
        [sys.executable, "-m", "stages.ui", "--port", str(port), "--stage", "retrieve"],
        cwd=project.root,
        env={**project.environment, "BROWSER": "true"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as server:
        try:
            line = ""
            for line in server.stdout:
                if line.startswith("Compare: "):
                    break
            assert f"http://127.0.0.1:{port}/#/compare-runs?runs=" in line
            address = line.removeprefix("Compare: ").strip()
            for _ in range(60):
                try:
                    with urllib.request.urlopen(address, timeout=5) as page:
                        assert page.status == 200
                        assert b"mlflow" in page.read().lower()
                    break
                except OSError:
                    time.sleep(1)
            else:
                raise AssertionError(f"{address} does not answer")
        finally:
            import os
            import signal

            os.killpg(server.pid, signal.SIGTERM)
