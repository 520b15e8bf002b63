"""The token cache: known passages are not tokenised, changed ones are noticed, no process sees half a file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny_bert

from tilerank.errors import TilerankError
from tilerank.token_cache import TokenCache, write_tokens
from tilerank.tokenization import load_tokenizer

DIGEST = "ab" * 32
TEXTS = ["the cell", "", "bone", "the cell ", "Zürich 漢字", "half \ud83d"]


def encode(texts):
    """Ids that tell a text: its length, then its first character."""
    return [np.array([len(text), *map(ord, text[:1])], dtype=np.int32) for text in texts]


def never(texts):
    if texts:
        raise AssertionError(f"{texts} were tokenised")
    return []


def rows(cache, texts):
    return [None if ids is None else ids.tolist() for ids in cache.find(texts)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "passages.tokens"


def test_known_passages_are_found_and_changed_ones_are_not(path: Path) -> None:
    report = write_tokens(path, DIGEST, encode, [*TEXTS, "bone"])
    assert (report.passages, report.tokenised, report.bytes) == (6, 6, path.stat().st_size)
    cache = TokenCache(path)
    assert (cache.tokenizer, len(cache), report.tokens) == (DIGEST, 6, 11)
    assert rows(cache, TEXTS) == [ids.tolist() for ids in encode(TEXTS)]
    assert cache.find(TEXTS)[0].dtype == np.int32
    assert rows(cache, ["the cells", "The cell", "bone", "the cell\u200b"]) == [None, None, [4, 98], None]
    assert cache.find([]) == []


def test_a_passage_that_was_found_needs_no_digest_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilerank import token_cache

    write_tokens(path, DIGEST, encode, TEXTS)
    cache = TokenCache(path)
    expected = [ids.tolist() for ids in encode(TEXTS)]
    assert rows(cache, TEXTS) == expected
    asked = []
    own = token_cache._digests
    monkeypatch.setattr(token_cache, "_digests", lambda texts: asked.extend(texts) or own(texts))
    assert rows(cache, TEXTS) == expected
    assert rows(cache, ["bone", "bones", "".join(["the", " cell"])]) == [[4, 98], None, [8, 116]]
    assert asked == ["bones"], "an equal text is the text, another is none that was found"
    assert rows(cache, ["bones"]) == [None]
    monkeypatch.setattr(token_cache, "_REMEMBERED", 20)
    small = TokenCache(path)
    for _ in range(3):
        assert rows(small, [*TEXTS, *TEXTS[::-1]]) == [*expected, *expected[::-1]]
    assert sum(map(len, small._remembered)) < 20 + max(map(len, TEXTS))


def test_only_new_passages_are_tokenised_again(path: Path) -> None:
    write_tokens(path, DIGEST, encode, TEXTS)
    before = path.read_bytes()
    assert write_tokens(path, DIGEST, never, TEXTS[::-1]).tokenised == 0
    assert path.read_bytes() == before, "the same corpus gives the same bytes, in whichever order it comes"
    seen = []
    report = write_tokens(path, DIGEST, lambda texts: seen.extend(texts) or encode(texts), ["bone", "bones"])
    assert (seen, report.passages, report.tokenised) == (["bones"], 2, 1)
    assert rows(TokenCache(path), ["bone", "bones", "the cell"]) == [[4, 98], [5, 98], None]
    assert write_tokens(path, "cd" * 32, encode, ["bone"]).tokenised == 1, "another tokenizer starts anew"


def test_an_empty_corpus(path: Path) -> None:
    assert write_tokens(path, DIGEST, encode, []).passages == 0
    assert rows(TokenCache(path), ["a"]) == [None]


def test_digests_that_share_their_first_half(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: digests that differ in the second half only."""
    from tilerank import token_cache

    def clashing(texts):
        return np.array([[7, sum(map(ord, text))] for text in texts], dtype="<u8").reshape(-1, 2)

    monkeypatch.setattr(token_cache, "_digests", clashing)
    write_tokens(path, DIGEST, encode, ["c", "a", "b"])
    assert rows(TokenCache(path), ["a", "b", "c", "d"]) == [[1, 97], [1, 98], [1, 99], None]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1], "is damaged"),
        (lambda data: data + b"x", "is damaged"),
        (lambda data: data[:20] + b"\xff" + data[21:], "is damaged"),
        (lambda data: data[:70] + b"\xff" + data[71:], "is damaged"),
        (lambda data: data[:20], "is no token cache"),
        (lambda data: b"", "is no token cache"),
    ],
)
def test_what_is_not_a_whole_cache_is_refused_and_written_anew(path: Path, damage, reason: str) -> None:
    write_tokens(path, DIGEST, encode, TEXTS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TilerankError, match=f"passages.tokens {reason}"):
        TokenCache(path)
    assert write_tokens(path, DIGEST, encode, TEXTS).tokenised == len(TEXTS)
    assert len(TokenCache(path)) == len(TEXTS)


@pytest.mark.parametrize("content", [b"a passage\n", b"{}" * 80, b"T"])
def test_a_file_of_the_user_s_is_not_replaced(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(TilerankError, match=r"passages.tokens is no token cache.*name another, or delete it first"):
        write_tokens(path, DIGEST, lambda texts: pytest.fail("tokenised for nothing"), TEXTS)
    assert path.read_bytes() == content
    with pytest.raises(TilerankError, match=r"passages.tokens is no token cache; write one with"):
        TokenCache(path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("passages.txt")], ids=["pipe", "link"])
def test_what_is_no_regular_file_is_refused_before_the_work(path: Path, make) -> None:
    path.parent.mkdir()
    make(path)
    with pytest.raises(TilerankError, match=r"passages.tokens is .*name .*another"):
        write_tokens(path, DIGEST, lambda texts: pytest.fail("tokenised for nothing"), TEXTS)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_threads_that_write_one_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its file open before either puts it in place."""
    from tilerank.data import atomic

    both, own = threading.Barrier(2, timeout=30), os.fsync
    monkeypatch.setattr(atomic.os, "fsync", lambda descriptor: both.wait() and own(descriptor))
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda _: write_tokens(path, DIGEST, encode, TEXTS), range(2)))
    assert [report.passages for report in reports] == [6, 6]
    assert rows(TokenCache(path), TEXTS) == [ids.tolist() for ids in encode(TEXTS)]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("place", [-1, -5, -9])
def test_a_passage_whose_ids_were_damaged_is_refused_and_the_others_are_not(path: Path, place: int) -> None:
    write_tokens(path, DIGEST, encode, ["bone", "bones", "the cell"])
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 1
    path.write_bytes(damaged)
    cache = TokenCache(path)
    for _ in range(2):
        with pytest.raises(TilerankError, match=r"passages.tokens is damaged: a passage's ids.*`tilerank index`"):
            cache.find(["bone", "bones", "the cell"])
    found = []
    for text in ["bone", "bones", "the cell"]:
        with contextlib.suppress(TilerankError):
            found += rows(cache, [text])
    expected = [ids.tolist() for ids in encode(["bone", "bones", "the cell"])]
    assert len(found) == 2
    assert all(row in expected for row in found)
    assert rows(cache, ["bone marrow"]) == [None]
    assert write_tokens(path, DIGEST, encode, ["bone", "bones", "the cell"]).tokenised == 3, "nothing is taken over"
    assert path.read_bytes() == whole


def test_another_format_is_refused_by_name_and_replaced(path: Path) -> None:
    write_tokens(path, DIGEST, encode, TEXTS)
    whole = path.read_bytes()
    path.write_bytes(b"TRTOKEN1" + whole[8:])
    with pytest.raises(
        TilerankError, match=r"the format TRTOKEN1, and this version reads TRTOKEN2; .*`tilerank index`"
    ):
        TokenCache(path)
    assert write_tokens(path, DIGEST, encode, TEXTS).tokenised == len(TEXTS)
    assert path.read_bytes() == whole


def test_places_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(TilerankError, match=r"absent: No such file.*tilerank index"):
        TokenCache(tmp_path / "absent")
    with pytest.raises(TilerankError, match="is a folder, but the output is a file"):
        write_tokens(tmp_path, DIGEST, encode, TEXTS)
    (tmp_path / "file").write_text("")
    with pytest.raises(TilerankError, match="cannot be written"):
        write_tokens(tmp_path / "file" / "tokens", DIGEST, encode, TEXTS)


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from tilerank.data import atomic
from tilerank.token_cache import write_tokens

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

moment, path = sys.argv[1], Path(sys.argv[2])
if moment == "rename":
    atomic.os.replace = die
def encode(texts):
    return [np.zeros(3, np.int32) for _ in texts]
if moment == "ids":
    atomic.os.fsync = die
write_tokens(path, "ab" * 32, encode, ["new one", "bone"])
print("not killed")
"""


@pytest.mark.parametrize("moment", ["ids", "rename"])
def test_a_killed_writer_leaves_the_old_file_and_readers_go_on(path: Path, moment: str) -> None:
    write_tokens(path, DIGEST, encode, TEXTS)
    before, reader = path.read_bytes(), TokenCache(path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, moment, str(path)], env=environment, capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert path.read_bytes() == before
    assert len(list(path.parent.iterdir())) == 2, "what the killed process wrote lies beside it"
    assert rows(TokenCache(path), ["bone"]) == [[4, 98]]
    write_tokens(path, DIGEST, encode, ["bones"])
    assert [file.name for file in path.parent.iterdir()] == [path.name], "the next writer clears up"
    assert rows(reader, ["bone", "bones"]) == [[4, 98], None], "an open file stays as it was"


def test_the_reranker_s_ids_come_from_the_cache(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_bert(tmp_path / "m")
    tokenizer = load_tokenizer(folder, 32)
    passages = ["the cell", "bone " * 40, "", "the cell"]
    write_tokens(path, tokenizer.digest, tokenizer.encode, passages)
    expected = tokenizer.pairs(["mouse"] * 4, passages)
    tokenizer.use_cache(TokenCache(path))
    asked = []
    own = tokenizer._begin
    monkeypatch.setattr(tokenizer, "_begin", lambda texts: asked.extend(texts) or own(texts))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tokenizer.pairs(["mouse"] * 4, passages)
    assert asked == ["mouse"], "only the query is new"
    for name in ("ids", "type_ids", "lengths", "truncated"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert tokenizer.pairs(["mouse"], ["the cells"]).lengths.tolist() == [7]
    assert asked == ["mouse", "mouse", "the cells"]
    other = load_tokenizer(write_tiny_bert(tmp_path / "n"), 32)
    other._backend.add_special_tokens(["zz"])
    with pytest.raises(TilerankError, match="holds ids of another tokenizer"):
        other.use_cache(TokenCache(path))
    tokens = max(tokenizer._backend.get_vocab().values())
    path.unlink()  # what it has would be taken over
    write_tokens(path, tokenizer.digest, lambda texts: [np.array([tokens + 1], np.int32) for _ in texts], passages)
    with pytest.raises(
        TilerankError, match=f"holds the id {tokens + 1}, and the tokenizer's last is {tokens}; .*index`"
    ):
        tokenizer.use_cache(TokenCache(path))
