"""The small project that the tests of the pipeline share."""

from __future__ import annotations

from pathlib import Path

import pytest
from projects import Project, make_project


@pytest.fixture(scope="session")
def project(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The small project with its record made by `dvc repro` and committed."""
    made = make_project(repository, tmp_path_factory.mktemp("project"))
    made.check("dvc repro --quiet")
    made.check("git add -A")
    made.check("git commit -qm record")
    return made
