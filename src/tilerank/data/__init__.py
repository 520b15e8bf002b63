"""Data sets: from where they come to one canonical form, and from that to records.

`prepare` writes corpus.jsonl, queries.jsonl and qrels.tsv; `load` reads them. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tilerank.config import DatasetSettings
from tilerank.data import beir, canonical, pydocs
from tilerank.data.atomic import whole_folder
from tilerank.data.canonical import DatasetSummary, load
from tilerank.errors import TilerankError

__all__ = ["DatasetSummary", "load", "prepare", "whole_folder"]

SOURCES = ("auto", "ir_datasets", "local", "pydocs")


def prepare(settings: DatasetSettings, out_dir: Path, root: Path) -> DatasetSummary:
    """Write the data set's canonical files as the folder ``out_dir``, all of them or none.

    ``root`` is the project's tree: a local data set is looked for in ``$TILERANK_DATA``, then in ``root``/data/raw.
    Raises `TilerankError` for data that is missing, damaged or not what ``settings.sha256`` says.
    """
    with _source(settings, root) as (source, origin), whole_folder(out_dir) as folder:
        summary = canonical.write(folder, source)
        canonical.check_digests(summary, settings.sha256, origin)
    return summary


@contextlib.contextmanager
def _source(settings: DatasetSettings, root: Path) -> Iterator[tuple[canonical.Source, str]]:
    """The data set's source, and what to call it in an error."""
    if settings.source not in SOURCES:
        raise TilerankError(f"dataset.source: no source {settings.source!r}; allowed: {', '.join(SOURCES)}")
    if settings.source == "pydocs":
        yield pydocs.PydocsSource.collect(settings.passages, settings.queries), "pydocs"
        return
    path = None if settings.source == "ir_datasets" else beir.find_local(settings.name, root)
    if path is None:
        advice = beir.where_to_put(settings.name, root)
        if settings.source == "local":
            raise TilerankError(f"no data set {settings.name!r} is here; {advice}")
        path = beir.ir_datasets_zip(settings.name, advice)
    with beir.open_source(path, settings.split) as source:
        yield source, str(path)
