"""The command line: what it prints, its exit codes, and one line for every error."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import write_tiny_bert

from tilerank import Reranker, __version__
from tilerank.cli import main

PASSAGES = ["bone cancer", "", "the heart of a mouse " * 30, "high risk"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("model"))


def _rerank(model: Path, *more: str) -> list[str]:
    return ["rerank", "--model", str(model), "--query", "bone", "--device", "cpu", "--max-length", "64", *more]


def _stdin(content: bytes) -> io.TextIOWrapper:
    """Standard input in a locale that is not UTF-8."""
    return io.TextIOWrapper(io.BytesIO(content), encoding="latin-1")


def _only_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]


def test_rerank_prints_what_rank_returns(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "passages.txt"
    file.write_text("".join(f"{passage}\n" for passage in PASSAGES), encoding="utf-8")
    expected = Reranker(model, device="cpu", max_length=64).rank("bone", PASSAGES, return_documents=True)
    assert main(_rerank(model, "--documents", str(file), "--json")) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"query": "bone", "truncated": 1, "results": expected}
    assert err == ""
    tokens = tmp_path / "passages.tokens"
    index = ["index", "--model", str(model), "--documents", str(file), "--out", str(tokens)]
    assert [main(index), main(index)] == [0, 0]
    first, again = capsys.readouterr().out.splitlines()
    assert first.startswith(f"4 passages, 154 tokens, {tokens.stat().st_size} bytes; 4 tokenised by tok")
    assert again.endswith("; 0 tokenised by tokenizers")
    assert main(_rerank(model, "--documents", str(file), "--json", "--token-cache", str(tokens))) == 0
    assert json.loads(capsys.readouterr().out)["results"] == expected
    assert main(_rerank(model, "--documents", str(file), "--token-cache", str(file))) == 1
    assert _only_line(capsys.readouterr().err) == f"tilerank: {file} is no token cache; write one with `tilerank index`"
    assert main(_rerank(model, "--documents", str(file), "--top-k", "2")) == 0
    out, err = capsys.readouterr()
    rows = [line.split("\t") for line in out.splitlines()]
    assert [(row[0], int(row[2])) for row in rows] == [("1", expected[0]["corpus_id"]), ("2", expected[1]["corpus_id"])]
    assert "1 passages cut to fit 64 tokens" in _only_line(err)


def test_passages_come_from_standard_input(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", _stdin("\ufeffbone\n\nzürich\n".encode()))
    assert main(_rerank(model, "--json")) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert {one["corpus_id"]: one["text"] for one in results} == {0: "bone", 1: "", 2: "zürich"}
    monkeypatch.setattr(sys, "stdin", _stdin(b""))
    assert main(_rerank(model, "--documents", "-", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["results"] == []


def test_a_terminal_that_lacks_a_character_still_gets_the_ranking(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _stdin("zürich\n".encode()))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(_rerank(model)) == 0
    out.seek(0)
    assert out.read().endswith("\tz?rich\n")


def test_passages_come_from_json_lines(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"_id": "7", "title": "Bone", "text": "cell"}\n"two\\nlines"\n{"text": "cut \\ud83d"}\n')
    assert main(_rerank(model, "--documents", str(file), "--json")) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert {one["corpus_id"]: one["text"] for one in results} == {0: "Bone cell", 1: "two\nlines", 2: "cut \ud83d"}
    assert main(_rerank(model, "--documents", str(file))) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    for record in ('{"title": "no text"}', '{"text": null}', '{"text": 3}', '{"text": "a", "title": 0}', "[" * 100_000):
        file.write_text(f'{{"text": "bone", "title": null}}\n{record}\n')
        assert main(_rerank(model, "--documents", str(file))) == 1
        assert f"{file}:2: expected a JSON string or an object with a text" in _only_line(capsys.readouterr().err)


def test_a_query_that_is_cut_is_one_line_of_warning(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", _stdin(b"bone\n"))
    arguments = _rerank(model, "--json")
    arguments[arguments.index("bone")] = "bone " * 90
    assert main(arguments) == 0
    assert _only_line(capsys.readouterr().err).startswith("tilerank: warning: query 'bone bone")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "./no/such/folder"], "./no/such/folder: no such model folder"),
        (["--documents", "no-such-file"], "no-such-file: No such file or directory"),
        (["--max-length", "65"], "max_length is 65; the model's position table serves at most 64 tokens"),
        (["--device", "cuda:99"], "CUDA devices"),
        (["--attention", "magic"], "attention is 'magic'; allowed: auto, sdpa, eager"),
    ],
)
def test_errors_are_one_line(
    model: Path,
    more: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", _stdin(b"bone\n"))
    assert main(_rerank(model, *more)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in _only_line(err)
    assert err.startswith("tilerank: ")


def test_files_that_are_not_text(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "binary"
    file.write_bytes(b"ab\xff\xfe")
    assert main(_rerank(model, "--documents", str(file))) == 1
    assert "is not UTF-8 text" in _only_line(capsys.readouterr().err)
    monkeypatch.setattr(sys, "stdin", _stdin(b"ab\xff\xfe"))
    assert main(_rerank(model)) == 1
    assert "standard input is not UTF-8 text" in _only_line(capsys.readouterr().err)
    assert main(_rerank(model, "--documents", str(tmp_path))) == 1
    assert "Is a directory" in _only_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["rerank"],
        ["rerank", "--model", "m", "--query", "q", "--top-k", "0"],
        ["rerank", "--model", "m", "--query", "q", "--precision", "int8"],
        ["evaluate", "--qrels", "q"],
        ["unknown"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: tilerank" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["x", "0", "-1", "1.5", ""])
def test_a_number_that_is_none_is_named(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["rerank", "--model", "m", "--query", "q", f"--top-k={number}"])
    assert f"argument --top-k: {number!r} is not a whole number of at least 1" in capsys.readouterr().err


def test_index_does_not_replace_its_own_passages(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.txt"
    file.write_text("bone\n")
    assert main(["index", "--model", str(model), "--documents", str(file), "--out", str(file)]) == 1
    assert f"{file} is no token cache" in _only_line(capsys.readouterr().err)
    assert file.read_text() == "bone\n"


# evaluate: nDCG@10 of query 1 is (1/log2(3)) / 1, of query 2 is 0 (no results)

QRELS_TREC = "1 0 b 1\n1 0 c 0\n2 0 d 2\n"
QRELS_BEIR = "query-id\tcorpus-id\tscore\n1\tb\t1\n1\tc\t0\n2\td\t2\n"
RUN_TREC = "1 Q0 a 1 2.5 tag\n1 Q0 b 2 2.0 tag\n9 Q0 a 1 1.0 tag\n"
RUN_JSON = '{"1": {"a": 2.5, "b": 2}, "9": {"a": 1}}'
NDCG = 0.6309297535714575 / 2


@pytest.mark.parametrize("qrels", [QRELS_TREC, QRELS_BEIR, "\ufeff" + QRELS_BEIR, QRELS_BEIR.replace("\n", "\r\n")])
@pytest.mark.parametrize("run", [RUN_TREC, RUN_JSON])
def test_evaluate(qrels: str, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "qrels").write_bytes(qrels.encode())
    (tmp_path / "run").write_bytes(run.encode())
    files = ["evaluate", "--qrels", str(tmp_path / "qrels"), "--run", str(tmp_path / "run")]
    assert main([*files, "--measures", "nDCG@10", "RR@10", "R@1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record.pop("nDCG@10") == pytest.approx(NDCG)
    assert record == {"RR@10": 0.25, "R@1": 0.0, "queries": 2, "with_results": 1}
    assert main([*files, "--measures", "nDCG@10"]) == 0
    assert capsys.readouterr().out == "nDCG@10\t0.3155\nqueries\t2\nwith results\t1\n"


def test_equal_scores_of_a_run_keep_the_file_s_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "qrels").write_text("1 0 a 1\n")
    for first, second, expected in (("a", "b", 1.0), ("b", "a", 0.5)):
        (tmp_path / "run").write_text(f"1 Q0 {first} 1 3.0 t\n1 Q0 {second} 2 3.0 t\n")
        arguments = [
            "--qrels",
            str(tmp_path / "qrels"),
            "--run",
            str(tmp_path / "run"),
            "--measures",
            "RR@10",
            "--json",
        ]
        assert main(["evaluate", *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["RR@10"] == expected


@pytest.mark.parametrize(
    ("qrels", "run", "measure", "message"),
    [
        ("1 0 b\n", RUN_TREC, "nDCG@10", "qrels:1: expected 4 columns, found 3"),
        ("query-id\tcorpus-id\tscore\n1\tb\n", RUN_TREC, "nDCG@10", "qrels:2: expected 3 columns, found 2"),
        ("1 0 b much\n", RUN_TREC, "nDCG@10", "qrels:1: 'much' is not a whole number"),
        ("1 0 b 1_0\n", RUN_TREC, "nDCG@10", "qrels:1: '1_0' is not a whole number of at most nine digits"),
        ("1 0 b 1" + "0" * 400 + "\n", RUN_TREC, "nDCG@10", "is not a whole number of at most nine digits"),
        ("", RUN_TREC, "nDCG@10", "holds no judgements"),
        (QRELS_TREC, "1 a 2.5\n", "nDCG@10", "run:1: expected query Q0 document rank score tag"),
        (QRELS_TREC, "1 Q0 a 1 nan t\n", "nDCG@10", "run:1: 'nan' is not a number"),
        (QRELS_TREC, "1 Q0 a 1 2 t\n1 Q0 a 2 1 t\n", "nDCG@10", "run:2: document a stands twice under query 1"),
        (QRELS_TREC, '{"1": [1, 2]}', "nDCG@10", "expected JSON {query: {document: score}}"),
        (QRELS_TREC, '{"1": {"a": "high"}}', "nDCG@10", "'high' is not a number"),
        (QRELS_TREC, '{"1": {"a": true}}', "nDCG@10", "run: True is not a number"),
        (QRELS_TREC, "1 Q0 a 1 1_000 t\n", "nDCG@10", "run:1: '1_000' is not a number"),
        (QRELS_TREC, '{"1": ', "nDCG@10", "expected JSON {query: {document: score}}"),
        (QRELS_TREC + "1 0 b 0\n", RUN_TREC, "nDCG@10", "qrels:4: document b is judged twice under query 1"),
        (QRELS_TREC, '{"1": {"a": 1}, "1": {}}', "nDCG@10", "run: the key '1' stands twice in one object"),
        (QRELS_TREC, '{"1": {"a": 1, "a": 2}}', "nDCG@10", "run: the key 'a' stands twice in one object"),
        (QRELS_TREC, '{"1": {"a": 1' + "0" * 400 + "}}", "nDCG@10", "is not a number"),
        (QRELS_TREC, '{"a":' * 100_000, "nDCG@10", "run: expected JSON {query: {document: score}}"),
        (QRELS_TREC, RUN_TREC, "magic@10", "unknown measure 'magic@10'"),
        (QRELS_TREC, None, "nDCG@10", "run: No such file or directory"),
    ],
)
def test_evaluate_s_errors_are_one_line(
    qrels: str, run: str | None, measure: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "qrels").write_text(qrels)
    if run is not None:
        (tmp_path / "run").write_text(run)
    arguments = ["--qrels", str(tmp_path / "qrels"), "--run", str(tmp_path / "run"), "--measures", measure]
    assert main(["evaluate", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in _only_line(err)


def test_one_standard_input_is_not_two_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--qrels", "-", "--run", "-", "--measures", "nDCG@10"]) == 1
    assert "--qrels and --run are both standard input" in _only_line(capsys.readouterr().err)


@pytest.fixture
def environment(repository: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(repository / "src")}


def test_the_program_is_quick_where_no_model_is_needed(tmp_path: Path, environment: dict[str, str]) -> None:
    code = (
        "import sys; from tilerank.cli import main\ntry: main(sys.argv[1:])\nfinally: assert 'torch' not in sys.modules"
    )
    (tmp_path / "qrels").write_text(QRELS_TREC)
    (tmp_path / "run").write_text(RUN_TREC)
    evaluate = ["evaluate", "--qrels", "qrels", "--run", "run", "--measures", "nDCG@10"]
    for arguments, expected in (["--version"], f"tilerank {__version__}\n"), (["--help"], "usage"), (evaluate, "nDCG"):
        program = [sys.executable, "-c", code, *arguments]
        answer = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (answer.returncode, answer.stderr) == (0, "")
        assert answer.stdout.startswith(expected)


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "qrels").write_text(QRELS_TREC)
    (tmp_path / "run").write_text(RUN_TREC)
    program = [sys.executable, "-m", "tilerank.cli", "evaluate", "--qrels", "qrels", "--run", "run"]
    process = subprocess.Popen(
        [*program, "--measures", "nDCG@10"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 0


@pytest.mark.parametrize(
    ("redirection", "message"),
    [
        (">/dev/full", "No space left on device"),
        (">&-", "standard output is closed"),
        ("--qrels - <&-", "standard input is closed"),
        ("--qrels missing 2>&-", ""),  # the error has nowhere to go; standard output is not the place
    ],
)
def test_streams_that_cannot_be_used(
    redirection: str, message: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "qrels").write_text(QRELS_TREC)
    (tmp_path / "run").write_text(RUN_TREC)
    command = f"{sys.executable} -m tilerank.cli evaluate --qrels qrels --run run --measures AP {redirection}"
    answer = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stdout) == (1, "")
    assert message in (_only_line(answer.stderr) if message else answer.stderr)
