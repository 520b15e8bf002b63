"""Compose Hydra groups the way DVC does, so that both write the same bytes."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tilerank.config import Settings, load_settings, unknown_setting
from tilerank.errors import TilerankError


def compose_file(conf: Path, destination: Path, overrides: Sequence[str]) -> Settings:
    """Compose ``conf``/config.yaml with ``overrides`` into ``destination`` (replaced only if all is well).

    The composition is `dvc.utils.hydra.compose_and_dump`, which `dvc exp run -S` calls.
    """
    from dvc.utils.hydra import compose_and_dump
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".compose-") as folder:
        composed = Path(folder) / "params.yaml"
        try:
            compose_and_dump(composed, str(conf.resolve()), None, "config", folder, list(overrides))
        except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:  # the last two: of both
            reason = " ".join(str(error).split())
            if found := re.match(r"Could not override '([^']+)'", reason):
                # Hydra would have the key appended, which is refused in turn.
                reason = unknown_setting(found[1]) or reason
            raise TilerankError(f"cannot compose {' '.join(overrides)!r}: {reason}") from error
        settings = load_settings(composed)
        os.replace(composed, destination)
    return settings


def compose_settings(conf: Path, overrides: Sequence[str]) -> Settings:
    """Compose ``conf`` with ``overrides`` in memory."""
    with tempfile.TemporaryDirectory(prefix="tilerank-compose-") as folder:
        return compose_file(conf, Path(folder) / "params.yaml", overrides)
