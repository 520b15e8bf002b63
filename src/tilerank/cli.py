"""The command ``tilerank``: rerank passages for a query, index passages, evaluate a run, check the machine."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from tilerank._version import __version__
from tilerank.errors import TilerankError

_GRADE = re.compile(r"[+-]?[0-9]{1,9}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when it ended well, 1 after one line on stderr, 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    if sys.stderr is None:  # closed: print would write errors to standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    try:
        if sys.stdout is None:
            raise TilerankError("standard output is closed; open it, or redirect it to a file")
        with _warnings_in_one_line():
            options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        _discard_output()
        return 0
    except (TilerankError, ValueError, RuntimeError, MemoryError, OSError) as error:
        print(f"tilerank: {' '.join(str(error).split())}", file=sys.stderr)
        if isinstance(error, OSError):  # a full disk: what is left unwritten would fail once more at the exit
            _discard_output()
        return 1
    except KeyboardInterrupt:
        print("tilerank: interrupted", file=sys.stderr)
        return 130
    return 0


def _discard_output() -> None:
    with contextlib.suppress(io.UnsupportedOperation):  # not a file: nothing is written at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tilerank", description="Rerank passages, and measure rankings.")
    parser.add_argument("--version", action="version", version=f"tilerank {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    rerank = commands.add_parser("rerank", help="order passages by how well they answer a query")
    rerank.add_argument("--model", required=True, help="model folder, known model's name, or hub repository")
    rerank.add_argument("--query", required=True, help="the query's text")
    rerank.add_argument(
        "--documents",
        default="-",
        metavar="FILE",
        help="one passage a line; in a .jsonl file one JSON value a line, a string or an object with a text (and a "
        "title); - (the default): standard input",
    )
    rerank.add_argument("--top-k", type=_positive, metavar="N", help="how many to print (default: all)")
    rerank.add_argument("--max-length", type=_positive, default=512, metavar="TOKENS", help="default: %(default)s")
    rerank.add_argument("--batch-size", type=_positive, metavar="PAIRS", help="default: by the device")
    rerank.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    rerank.add_argument("--precision", choices=("fp32", "tf32", "fp16", "bf16"), default="fp32")
    rerank.add_argument("--attention", default="auto", help="auto, sdpa, eager or a kernel's name (default: auto)")
    rerank.add_argument("--token-cache", metavar="FILE", help="what `tilerank index` wrote for this model")
    rerank.add_argument("--json", action="store_true", help="print one JSON object")
    rerank.set_defaults(command=_rerank)

    index = commands.add_parser("index", help="tokenise passages once, into a file that reranking reads")
    index.add_argument("--model", required=True, help="model folder, known model's name, or hub repository")
    index.add_argument("--documents", default="-", metavar="FILE", help="as for rerank; default: standard input")
    index.add_argument("--out", required=True, metavar="FILE", help="what it has already is not tokenised again")
    index.set_defaults(command=_index)

    evaluate = commands.add_parser("evaluate", help="measures of a run against judgements")
    evaluate.add_argument("--qrels", required=True, metavar="FILE", help="TREC format, or BEIR's TSV with its header")
    evaluate.add_argument(
        "--run", required=True, metavar="FILE", help="TREC format, or JSON {query: {document: score}}"
    )
    evaluate.add_argument("--measures", nargs="+", required=True, metavar="MEASURE", help="nDCG@10 RR@10 R@50 AP ...")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    evaluate.set_defaults(command=_evaluate)

    doctor = commands.add_parser("doctor", help="check compiler, device and kernel library, a sanity kernel first")
    doctor.set_defaults(command=_doctor)
    return parser


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number of at least 1")
    return number


def _rerank(options: argparse.Namespace) -> None:
    documents = _read_documents(options.documents)
    from tilerank.reranker import Reranker  # torch: only once the files are known to be good

    reranker = Reranker(
        options.model,
        device=options.device,
        precision=options.precision,
        attention=options.attention,
        max_length=options.max_length,
        token_cache=options.token_cache,
    )
    ranking = reranker.rank(
        options.query,
        documents,
        top_k=options.top_k,
        return_documents=True,
        batch_size=options.batch_size,
        show_progress_bar=True,
    )
    if options.json:
        _print_json({"query": options.query, "truncated": ranking.truncated, "results": list(ranking)})
        return
    for rank, result in enumerate(ranking, start=1):
        # What the terminal's encoding lacks is replaced: a ranking is worth more than a character.
        encoding = sys.stdout.encoding or "utf-8"
        text = " ".join(result["text"].split()).encode(encoding, "replace").decode(encoding)
        print(f"{rank}\t{result['score']:.6f}\t{result['corpus_id']}\t{text}")
    if ranking.truncated:
        print(f"tilerank: {ranking.truncated} passages cut to fit {reranker.max_length} tokens", file=sys.stderr)


def _index(options: argparse.Namespace) -> None:
    documents = _read_documents(options.documents)
    from tilerank.models import describe, resolve_path
    from tilerank.token_cache import write_tokens
    from tilerank.tokenization import load_tokenizer

    path = resolve_path(options.model)
    texts = 2 if describe(path).kind == "cross-encoder" else 1
    tokenizer = load_tokenizer(path, sys.maxsize, texts=texts)  # ids are kept whole: cutting is for who reads them
    report = write_tokens(Path(options.out), tokenizer.digest, tokenizer.encode, documents)
    print(
        f"{report.passages} passages, {report.tokens} tokens, {report.bytes} bytes; "
        f"{report.tokenised} tokenised by {tokenizer.engine}"
    )


def _doctor(options: argparse.Namespace) -> None:
    from tilerank import kernels

    failed = []
    for check in kernels.doctor():
        verdict = {True: "ok", False: "FAILED", None: "-"}[check.ok]
        print(f"{check.name:14} {verdict:7} {check.detail}", flush=True)
        if check.ok is False:
            failed.append(check.name)
    if failed:
        raise TilerankError(f"{', '.join(failed)} failed; the details are above")


def _evaluate(options: argparse.Namespace) -> None:
    from tilerank.evaluation import evaluate

    if options.qrels == options.run == "-":
        raise TilerankError("--qrels and --run are both standard input (-); give a file for one of them")
    qrels = _read_qrels(options.qrels)
    result = evaluate(qrels, _read_run(options.run), options.measures)
    counts = {"queries": result.queries, "with_results": result.with_results}
    if options.json:
        _print_json({**result, **counts})
        return
    for measure, mean in result.items():
        print(f"{measure}\t{mean:.4f}")
    print(f"queries\t{result.queries}\nwith results\t{result.with_results}")


def _print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, indent=2, ensure_ascii=True, allow_nan=False))


def _read_documents(name: str) -> list[str]:
    """The passages, in order; a blank line is an empty passage, so that line numbers and indices agree."""
    with _open(name) as stream:
        lines = [line.rstrip("\r\n") for line in stream]
    if not name.endswith(".jsonl"):
        return lines
    passages = []
    for number, line in enumerate(lines, start=1):
        try:
            passages.append(_passage(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TilerankError(f"{name}:{number}: expected a JSON string or an object with a text") from error
    return passages


def _passage(record: Any) -> str:
    """Title and text as one passage; a title may be absent or null."""
    if isinstance(record, str):
        return record.strip()
    title, text = record.get("title"), record["text"]
    if not isinstance(text, str) or not isinstance(title, str | None):
        raise TypeError("title and text must be strings")
    return f"{title or ''} {text}".strip()


def _read_qrels(name: str) -> dict[str, dict[str, int]]:
    """``query iteration document grade`` (TREC) or, below BEIR's header, ``query document grade`` with tabs."""
    with _open(name) as stream:
        lines = [(number, line.strip("\r\n")) for number, line in enumerate(stream, start=1) if line.strip()]
    is_beir = bool(lines) and lines[0][1].startswith("query-id\t")
    columns = (0, 1, 2) if is_beir else (0, 2, 3)
    qrels: dict[str, dict[str, int]] = {}
    for number, line in lines[1:] if is_beir else lines:
        fields = line.split("\t" if is_beir else None)
        if len(fields) != columns[-1] + 1:
            raise TilerankError(f"{name}:{number}: expected {columns[-1] + 1} columns, found {len(fields)}")
        query, document, grade = (fields[column] for column in columns)
        grades = qrels.setdefault(query, {})
        if document in grades:
            raise TilerankError(f"{name}:{number}: document {document} is judged twice under query {query}")
        if not _GRADE.fullmatch(grade):
            raise TilerankError(f"{name}:{number}: {grade!r:.80} is not a whole number of at most nine digits")
        grades[document] = int(grade)
    if not qrels:
        raise TilerankError(f"{name} holds no judgements")
    return qrels


def _read_run(name: str) -> dict[str, dict[str, float]]:
    """``query Q0 document rank score tag`` (TREC; equal scores keep the file's order) or one JSON object."""
    with _open(name) as stream:
        text = stream.read()
    if text.lstrip().startswith("{"):
        return _read_json_run(text, name)
    run: dict[str, dict[str, float]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        fields = line.split()
        if len(fields) != 6:
            raise TilerankError(
                f"{name}:{number}: expected query Q0 document rank score tag, found {len(fields)} columns"
            )
        documents = run.setdefault(fields[0], {})
        if fields[2] in documents:
            raise TilerankError(f"{name}:{number}: document {fields[2]} stands twice under query {fields[0]}")
        documents[fields[2]] = _score(fields[4], f"{name}:{number}")
    return run


def _read_json_run(text: str, name: str) -> dict[str, dict[str, float]]:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise TilerankError(f"{name}: the key {repeated!r} stands twice in one object")
        return content

    try:
        content = json.loads(text, object_pairs_hook=distinct)
        tables = [(query, documents.items()) for query, documents in content.items()]
    except (ValueError, AttributeError, RecursionError) as error:
        raise TilerankError(f"{name}: expected JSON {{query: {{document: score}}}} ({error})") from error
    return {query: {document: _score(value, name) for document, value in rows} for query, rows in tables}


def _score(value: Any, place: str) -> float:
    # Python's own spellings, 1_000 for a thousand and True for 1, are none of a run's.
    is_python_only = isinstance(value, bool) or (isinstance(value, str) and ("_" in value or not value.isascii()))
    try:
        score = math.nan if is_python_only else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if math.isnan(score):
        raise TilerankError(f"{place}: {value!r:.80} is not a number")
    return score


@contextlib.contextmanager
def _open(name: str) -> Iterator[TextIO]:
    """Lines of UTF-8 text, with or without a byte order mark, whatever the locale; ``-`` is standard input."""
    try:
        if name == "-":
            if sys.stdin is None:
                raise TilerankError("standard input is closed; name a file")
            stream = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", newline="\n")
            try:
                yield stream
            finally:
                stream.detach()  # else standard input would be closed with the wrapper
            return
        with open(name, encoding="utf-8-sig", newline="\n") as stream:
            yield stream
    except OSError as error:
        raise TilerankError(f"{name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        place = "standard input" if name == "-" else name
        raise TilerankError(f"{place} is not UTF-8 text (byte {error.start})") from error


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Show the package's own warnings as the errors are shown; leave other libraries' to the libraries' user."""

    def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
        if category is UserWarning:
            print(f"tilerank: warning: {' '.join(str(message).split())}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield


if __name__ == "__main__":
    sys.exit(main())
