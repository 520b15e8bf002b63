"""Token counts of the model's rows, and the padding that they leave in a batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from beir_data import dataset_settings

from tilerank import data, retrieval, token_lengths
from tilerank.config import ModelSettings, RetrievalSettings
from tilerank.errors import TilerankError
from tilerank.models import ResolvedModel, resolve
from tilerank.token_lengths import PoolLengths, pair_length, pool_lengths
from tilerank.types import Dataset, Document, Pool, Query

CROSS_ENCODER = {"architectures": ["BertForSequenceClassification"], "num_labels": 1, "max_position_embeddings": 64}
BI_ENCODER = {"architectures": ["BertModel"], "max_position_embeddings": 64}


def model_folder(folder: Path, config: dict, tokenizer_config: dict | None = None) -> ResolvedModel:
    """A model folder without weights: BERT's template over words, saved with a truncation and padding to 8 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer_config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    kind = "cross-encoder" if config is CROSS_ENCODER else "bi-encoder"
    return ResolvedModel(folder, folder.name, "", kind)


@pytest.fixture
def dataset() -> Dataset:
    return Dataset(
        name="words",
        documents=(
            Document("short", "t", "w w"),
            Document("blank", "", ""),
            Document("long", "", "w " * 100),
            Document("fits", "", "w " * 15),
        ),
        queries=(Query("q1", "w w"), Query("q2", "w " * 17), Query("q3", "w " * 30)),
        qrels={"q1": {"short": 1}, "q2": {"short": 1}, "q3": {"short": 1}},
    )


@pytest.fixture
def pools() -> list[Pool]:
    doc_ids = ("short", "blank", "long", "fits")
    return [Pool(query_id, doc_ids, (4.0, 3.0, 2.0, 1.0)) for query_id in ("q1", "q2")] + [Pool("q3", (), ())]


@pytest.mark.parametrize(
    ("query", "passage", "max_length", "expected"),
    [(5, 10, 512, 18), (5, 504, 512, 512), (5, 505, 512, 512), (600, 10, 512, 512), (0, 0, 512, 3), (1, 1, 4, 4)],
)
def test_pair_length(query: int, passage: int, max_length: int, expected: int) -> None:
    assert pair_length(query, passage, max_length) == expected


def test_pair_length_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="max_length must be above the 3 special tokens, got 3"):
        pair_length(1, 1, 3)
    with pytest.raises(ValueError, match="must be at least 0, got -1 and 1"):
        pair_length(-1, 1, 512)


def test_rows_of_a_cross_encoder(tmp_path: Path, dataset: Dataset, pools: list[Pool]) -> None:
    lengths = pool_lengths(dataset, pools, model_folder(tmp_path / "m", CROSS_ENCODER), 20)
    assert lengths == PoolLengths(
        kind="cross-encoder",
        max_length=20,
        lengths={"q1": (8, 5, 20, 20), "q2": (20, 20, 20, 20), "q3": ()},
        cut_passages=4,  # "long" twice; q2 has no room for "short" and "fits", and "blank" loses nothing
        cut_queries=2,  # q2 leaves no token for a passage, q3 is longer than the row
    )


def test_rows_of_a_bi_encoder(tmp_path: Path, dataset: Dataset, pools: list[Pool]) -> None:
    lengths = pool_lengths(dataset, pools, model_folder(tmp_path / "m", BI_ENCODER), 20)
    assert lengths.lengths == {"q1": (5, 2, 20, 17), "q2": (5, 2, 20, 17), "q3": ()}
    assert (lengths.kind, lengths.cut_passages, lengths.cut_queries) == ("bi-encoder", 2, 0)


def test_limits_of_the_model(tmp_path: Path, dataset: Dataset, pools: list[Pool]) -> None:
    model = model_folder(tmp_path / "m", CROSS_ENCODER, {"model_max_length": 12})
    assert pool_lengths(dataset, pools, model, 64).max_length == 12
    with pytest.raises(TilerankError, match=r"max_length is 65, but the position table of m serves at most 64 tokens"):
        pool_lengths(dataset, pools, model, 65)
    with pytest.raises(TilerankError, match="must be above the 3 special tokens of m, found 3"):
        pool_lengths(dataset, pools, model, 3)
    unlimited = model_folder(tmp_path / "u", CROSS_ENCODER, {"model_max_length": 1e30})
    assert pool_lengths(dataset, pools, unlimited, 64).max_length == 64
    sentences = model_folder(tmp_path / "s", CROSS_ENCODER)
    (tmp_path / "s" / "sentence_bert_config.json").write_text('{"max_seq_length": 30}')
    assert pool_lengths(dataset, pools, sentences, 64).max_length == 30


def test_tokenizers_that_cannot_be_read(tmp_path: Path, dataset: Dataset, pools: list[Pool]) -> None:
    model = model_folder(tmp_path / "m", CROSS_ENCODER, {})
    (tmp_path / "m" / "tokenizer_config.json").write_text("{")
    with pytest.raises(TilerankError, match=r"tokenizer_config.json cannot be read .*; fetch the model again"):
        pool_lengths(dataset, pools, model, 20)
    (tmp_path / "m" / "tokenizer_config.json").unlink()
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    with pytest.raises(TilerankError, match=r"tokenizer.json cannot be read .*; fetch the model again"):
        pool_lengths(dataset, pools, model, 20)
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(TilerankError, match=r"tokenizer.json is missing; save the model with its fast tokenizer"):
        pool_lengths(dataset, pools, model, 20)


def test_workload_record_by_hand() -> None:
    lengths = PoolLengths("cross-encoder", 10, {"q1": (10, 5, 1), "q2": (4,), "q3": ()}, 0, 0)
    assert token_lengths.workload_record(lengths) == {
        "sequences": 1.333333,
        "tokens": 6.666667,
        "mean_tokens": 5.0,
        "padded_rows": 1.0,
        "square_ratio": 0.355,  # (100 + 25 + 1 + 16) / (4 * 100)
    }
    assert token_lengths.workload_record(PoolLengths("cross-encoder", 10, {"q1": ()}, 0, 0)) == {}


def test_histogram_bins_hold_their_upper_edge() -> None:
    assert token_lengths.histogram([1, 16, 17, 32, 33, 40, 40], 40) == ([0, 16, 32, 40], [2, 2, 3])
    assert token_lengths.histogram([0, 512, 497, 496], 512)[1] == [1, *[0] * 29, 1, 2]


def test_lengths_are_read_back(tmp_path: Path) -> None:
    lengths = PoolLengths("bi-encoder", 32, {"b": (3, 32), "a": (), "\u00e9": (17,)}, 1, 0)
    path = tmp_path / "lengths.json"
    token_lengths.write_lengths(path, lengths)
    assert token_lengths.read_lengths(path) == lengths
    assert json.loads(path.read_text())["histogram"] == {"edges": [0, 16, 32], "rows": [1, 2]}
    path.write_text("[]")
    with pytest.raises(TilerankError, match=r"not a record of token lengths; run `dvc repro retrieve`"):
        token_lengths.read_lengths(path)
    with pytest.raises(TilerankError, match=r"absent: No such file or directory; run `dvc repro retrieve`"):
        token_lengths.read_lengths(tmp_path / "absent")


def test_the_published_workload_of_scifact(
    scifact_dir: Path, cross_encoder_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 50 rows padded to 512 tokens 43.5 hold padding; attention needs 0.53 of the scores that it computes."""
    monkeypatch.setenv("TILERANK_DATA", str(scifact_dir.parent))
    monkeypatch.setenv("TILERANK_MODELS", str(cross_encoder_dir.parent))
    data.prepare(dataset_settings("scifact"), tmp_path / "canonical", tmp_path)
    dataset = data.load(tmp_path / "canonical", "scifact")
    pools = retrieval.bm25_pools(dataset, RetrievalSettings("bm25", 1.5, 0.75, "en", 0), 50)
    model = resolve(ModelSettings(cross_encoder_dir.name, None, None), tmp_path)
    lengths = pool_lengths(dataset, pools, model, 512)
    record = token_lengths.workload_record(lengths)
    assert record["sequences"] == pytest.approx(50, abs=0.05)  # one query has fewer hits
    assert record["mean_tokens"] == pytest.approx(360, abs=0.5)
    assert record["tokens"] == pytest.approx(18_000, rel=0.001)
    assert record["padded_rows"] == pytest.approx(43.5, abs=0.05)
    assert record["square_ratio"] == pytest.approx(0.535, abs=0.001)
    assert lengths.cut_queries == 0

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cross_encoder_dir)
    texts = {document.doc_id: document.contents for document in dataset.documents}
    for query, pool in list(zip(dataset.queries, pools, strict=True))[:3]:
        passages = [texts[doc_id] for doc_id in pool.doc_ids]
        rows = tokenizer([query.text] * len(passages), passages, truncation="only_second", max_length=512)["input_ids"]
        assert lengths.lengths[pool.query_id] == tuple(map(len, rows))
        assert max(map(len, rows)) == 512


def test_the_packaged_encoders_tokens_are_those_of_transformers(bi_encoder_dir: Path) -> None:
    from transformers import AutoTokenizer

    texts = [
        "Wrap a single paragraph of text.",
        "caf\u00e9 \u6f22\u5b57 \U0001f9ea naïve",
        "",
        "x" * 300,
        "fill(text : string) -> str " * 90,
    ]
    documents = tuple(Document(f"d{place}", "", text) for place, text in enumerate(texts))
    dataset = Dataset("texts", documents, (Query("q", "text"),), {"q": {"d0": 1}})
    pools = [Pool("q", tuple(document.doc_id for document in documents), (5.0, 4.0, 3.0, 2.0, 1.0))]
    lengths = pool_lengths(dataset, pools, ResolvedModel(bi_encoder_dir, "m", "", "bi-encoder"), 256)
    tokenizer = AutoTokenizer.from_pretrained(bi_encoder_dir)
    contents = [document.contents for document in documents]
    rows = tokenizer(contents, truncation=True, max_length=256)["input_ids"]
    assert lengths.lengths["q"] == tuple(map(len, rows))
    assert lengths.cut_passages == 1


def test_no_torch_is_imported() -> None:
    code = "import sys, tilerank.token_lengths, tilerank.data, tilerank.retrieval; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120).returncode == 0
