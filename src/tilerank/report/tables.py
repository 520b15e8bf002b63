"""The tables: which figures of the summary stand in which, under what heading, in what unit.

One description serves the README (Markdown), the page (HTML) and the terminal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tilerank.report.analysis import analyse
from tilerank.report.records import PER_VARIANT, PRECISIONS, Record, Summary, lookup, sources

ABSENT = "–"
FAILED = "FAIL"
"""In place of the figure of what failed its check."""


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of each row."""

    heading: str
    key: str
    show: Callable[[Any], str]


Entries: TypeAlias = Callable[[Mapping[str, Any], Sequence[str]], list[tuple[str, Mapping[str, Any]]]]
"""(section, ladder order) -> (row label, figures by key) of every row."""


def keyed(section: Mapping[str, Any], order: Sequence[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """A row for every mapping in the section: in the given order, then precisions, numbers and names."""

    def place(key: str) -> tuple[int, float, str]:
        if key in order:
            return 0, order.index(key), ""
        if key in PRECISIONS:
            return 1, PRECISIONS.index(key), ""
        digits = key.split("x")[0]
        return (2, int(digits), key) if digits.isdecimal() else (3, 0, key)

    return [(key, section[key]) for key in sorted(section, key=place) if isinstance(section[key], Mapping)]


def keyed_twice(section: Mapping[str, Any], order: Sequence[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """A row for every mapping two levels down, labelled by both keys."""
    return [
        (f"{outer.replace('_', '-')} {inner}", figures)
        for outer, values in keyed(section, order)
        for inner, figures in keyed(values, order)
    ]


def whole(section: Mapping[str, Any], order: Sequence[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """The section itself is the only row."""
    return [("share", section)]


def as_given(section: Mapping[str, Any], order: Sequence[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """A row for every mapping in the section, in its own order."""
    return [(key, values) for key, values in section.items() if isinstance(values, Mapping)]


def ladder_entries(section: Mapping[str, Any], order: Sequence[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """The variants; what `best_ffma` says stands in the row of its variant."""
    return keyed({name: values for name, values in section.items() if name != "best_ffma"}, order)


def rung_entries(section: Mapping[str, Any], order: Sequence[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """A row for each precision and variant, in ladder order; what the input scales did to it joins its figures."""

    def flat(rung: Mapping[str, Any]) -> dict[str, Any]:
        scales = rung.get("scales", {}).items()
        return {**rung, **{f"{name}_{key}": value for name, figures in scales for key, value in figures.items()}}

    return [(label, flat(rung)) for label, rung in keyed_twice(section, order)]


def quality_entries(section: Mapping[str, Any], order: Sequence[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """The first stage on all its queries, the unmodified model, then every scorer at every precision."""
    first_stage = {"ndcg10": "bm25_ndcg10", "recall50": "bm25_recall50"}
    unmodified = {
        "ndcg10": "baseline_ndcg10",
        "mrr10": "baseline_mrr10",
        "recall10": "baseline_recall10",
        "queries": "queries",
    }
    fixed = [("BM25, all queries of the split", first_stage), ("unmodified model, fp32", unmodified)]
    return [
        *((label, {column: section[key] for column, key in keys.items() if key in section}) for label, keys in fixed),
        *keyed_twice(section, order),
    ]


def check_entries(section: Mapping[str, Any], order: Sequence[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """The variants; a check without an answer says why in its cell."""

    def told(values: Mapping[str, Any]) -> Mapping[str, Any]:
        reasons = values.get("not_available", {})
        keys = {column.key.rpartition("_")[0]: column.key for column in CHECK_COLUMNS}
        return {**values, **{keys[check]: f"not available ({reason})" for check, reason in reasons.items()}}

    return [(label, told(values)) for label, values in keyed(section, order)]


def tensorflow_entries(section: Mapping[str, Any], order: Sequence[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """A row for each precision, number of tokens and way of calling; what Keras has in the block's place comes last."""
    return [
        (f"{precision}, {tokens} tokens, {way.replace('stock_', 'Keras’s own, ')}", figures)
        for precision, lengths in keyed(section, order)
        for tokens, ways in keyed(lengths, order)
        for way, figures in as_given(ways, order)
    ]


@dataclass(frozen=True, slots=True)
class TableSpec:
    """How one section of the summary becomes a table."""

    name: str  # the section's key, the README marker's name and the page's anchor
    title: str
    stage: str  # that records it, for the list of what is absent
    row_heading: str
    columns: tuple[Column, ...]
    note: str = ""  # what the figures mean; never a figure
    facts: tuple[Column, ...] = ()  # figures of the section as a whole, told below the table
    entries: Entries = keyed
    measured_in: str = ""  # the records' section that the figures follow from, where that is another one

    @property
    def section(self) -> str:
        """The section of the records that says where the figures come from."""
        return self.measured_in or self.name


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts."""

    name: str
    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    section: str = ""  # of the records that it is from


def count(value: float) -> str:
    """1,234"""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Three significant digits, all digits before the point: 1,234 · 56.7 · 0.123"""
    size = abs(value)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{decimals}f}"


def ratio(value: float) -> str:
    """A speed-up: theirs / ours."""
    return f"{value:.2f}×"


def share(value: float) -> str:
    """A share of one, as per cent."""
    return f"{100 * value:.1f} %"


def estimated(value: float) -> str:
    """An occupancy estimated by torch's profiler, whose 0 (more than 48 KB of shared memory a block) is no estimate."""
    return share(value) if value > 0 else ABSENT


def measure(value: float) -> str:
    """A ranking measure: four digits."""
    return f"{value:.4f}"


def signed(value: float) -> str:
    """A difference of ranking measures."""
    return f"{value:+.4f}"


def error(value: float) -> str:
    """A numerical error."""
    return "0" if value == 0 else f"{value:.1e}"


def found(value: int | str) -> str:
    """How many findings of a tool, or why it was not asked."""
    return "clean" if value == 0 else _failed(value)


def wrong(value: int | str) -> str:
    """How many wrong results, or why there are none."""
    return "right" if value == 0 else _failed(value)


def _failed(value: int | str) -> str:
    return value if isinstance(value, str) else f"{FAILED}: {count(value)}"


def text(value: Any) -> str:
    """A name, as recorded."""
    return str(value)


def yes(value: bool) -> str:
    """yes, no"""
    return "yes" if value else "no"


def timeline(value: Mapping[str, Any]) -> str:
    """Where the tool's file is, or the reason why there is none."""
    return str(value["file"]) if value["available"] else f"not available ({value['reason']})"


QUALITY_COLUMNS = (
    Column("nDCG@10", "ndcg10", measure),
    Column("difference, low", "ndcg10_diff_low", signed),
    Column("difference, high", "ndcg10_diff_high", signed),
    Column("RR@10", "mrr10", measure),
    Column("R@10", "recall10", measure),
    Column("R@50", "recall50", measure),
    Column("top ten equal", "top10_exact", share),
    Column("of these by ties", "top10_ties", count),
    Column("largest logit difference", "max_abs_logit_diff", error),
    Column("Kendall's tau", "kendall_tau", measure),
    Column("queries", "queries", count),
)

CHECK_COLUMNS = (
    Column("cases", "cases", count),
    Column("own code", "native_wrong", wrong),
    Column("compute_75 PTX", "ptx_75_wrong", wrong),
    Column("compute_80 PTX", "ptx_80_wrong", wrong),
    Column("sampled cases", "sampled_cases", count),
    Column("memcheck", "memcheck_findings", found),
    Column("racecheck", "racecheck_findings", found),
    Column("initcheck", "initcheck_findings", found),
    Column("synccheck", "synccheck_findings", found),
)

TABLES = (
    TableSpec(
        "workload",
        "Workload",
        "retrieve",
        "workload",
        (
            Column("sequences", "sequences", count),
            Column("tokens", "tokens", count),
            Column("mean tokens", "mean_tokens", short),
            Column("padded rows", "padded_rows", short),
            Column("square ratio", "square_ratio", measure),
        ),
        "Padded rows are shorter than the batch's padded length; the square ratio is the share of a padded batch's "
        "attention scores that belong to real tokens.",
    ),
    TableSpec(
        "profile",
        "Where the time goes",
        "profile_baseline",
        "unmodified pipeline",
        (
            Column("tokenizer call", "tokenize_share", share),
            Column("of it, building tensors", "tensors_share", share),
            Column("forward pass", "forward_share", share),
            Column("attention, of the whole", "attention_share", share),
            Column("matrix products, of the whole", "gemm_share", share),
            Column("ceiling for a faster attention", "amdahl_ceiling", ratio),
        ),
        "Shares of one query's time from raw text to scores. The ceiling is Amdahl's law: the gain if attention "
        "took no time at all.",
        facts=(
            Column("Queries", "queries", count),
            Column("peak memory of the device, MB", "peak_mb", short),
            Column("peak memory of the process, MB", "process_peak_mb", short),
            Column("operator calls a query", "operators", count),
            Column("kernel launches a query", "launches", count),
            Column("Nsight Systems timeline", "nsys", timeline),
        ),
        entries=whole,
    ),
    TableSpec(
        "amdahl",
        "What each part can gain",
        "profile_baseline",
        "part",
        (
            Column("ms", "ms", short),
            Column("share", "share", share),
            Column("ceiling", "ceiling", ratio),
        ),
        "The ceiling is the gain of the whole query if the part took no time at all.",
        facts=(
            Column("The kernel's speed-up in the model, fp32", "kernel_speedup", ratio),
            Column("so the whole query's by Amdahl's law, attention alone replaced", "predicted_speedup", ratio),
            Column("measured for the whole query with all that tilerank replaces", "rerank_speedup", ratio),
        ),
        entries=as_given,
        measured_in="profile",
    ),
    TableSpec(
        "ladder",
        "The ladder (fp32, workload seed)",
        "bench_attention",
        "variant",
        (
            Column("µs", "us", short),
            Column("unmasked, µs", "unmasked_us", short),
            Column("products", "products", text),
            Column("against the rung before", "gain_over_rung_before", ratio),
            Column("against SDPA", "speedup_vs_sdpa", ratio),
            Column("against the best fp32 peer", "speedup_vs_best_peer", ratio),
            Column("which is", "best_peer", text),
            Column("largest error", "max_abs_error", error),
            Column("SDPA's", "sdpa_max_abs_error", error),
            Column("registers", "registers", count),
            Column("spilled bytes", "spill_bytes", count),
            Column("occupancy", "occupancy", estimated),
            Column("bound by", "bound_by", text),
            Column("commit", "commit", text),
        ),
        "Medians, cold L2; masked where the variant masks, else the whole padded batch; errors against float64. "
        "Speed-ups are SDPA's time / the variant's.",
        entries=ladder_entries,
    ),
    TableSpec(
        "rungs",
        "The ladder at other precisions (workload seed)",
        "bench_attention",
        "precision and variant",
        (
            Column("packed, µs", "packed_us", short),
            Column("padded, µs", "padded_us", short),
            Column("unmasked, µs", "unmasked_us", short),
            Column("against the best peer", "speedup_vs_best_peer", ratio),
            Column("which is", "best_peer", text),
            Column("inputs x1, against packed", "x1_speedup_vs_peer", ratio),
            Column("x8", "x8_speedup_vs_peer", ratio),
            Column("x40", "x40_speedup_vs_peer", ratio),
            Column("largest error", "max_abs_error", error),
            Column("SDPA's", "sdpa_max_abs_error", error),
            Column("share of the floor", "share_of_floor", share),
            Column("registers", "registers", count),
            Column("spilled bytes", "spill_bytes", count),
            Column("occupancy", "occupancy", estimated),
        ),
        "Medians, cold L2, padding left out; unmasked: the whole padded batch. Under x1, x8 and x40 all inputs are "
        "multiplied by that, and packed stands for torch's own packed kernel on the same data.",
        entries=rung_entries,
    ),
    TableSpec(
        "predicted",
        "Predicted and measured",
        "bench_attention",
        "variant",
        (
            Column("of", "case", text),
            Column("predicted, µs", "predicted_us", short),
            Column("measured, µs", "measured_us", short),
            Column("measured / predicted", "ratio", ratio),
        ),
        "Predictions were written down before anything was timed; a prediction that names no time is not listed.",
        measured_in="ladder",
    ),
    TableSpec(
        "counters",
        "What bound each kernel",
        "profile_kernels",
        "variant",
        (
            Column("bound by", "bound_by", text),
            Column("warps wait most for", "waits", text),
            Column("instructions of warps, million", "instructions_m", short),
            Column("issue slots used", "issue_slots", share),
            Column("SM", "sm_throughput", share),
            Column("memory beyond L2", "dram_throughput", share),
            Column("L1 hits", "l1_hit", share),
            Column("L2 hits", "l2_hit", share),
            Column("occupancy", "occupancy", share),
            Column("useful arithmetic", "useful_arithmetic", share),
        ),
        "Counters of Nsight Compute, as shares of what the device can do. A kernel is bound by the kind of wait that "
        "takes the largest share of its warps' time; issue: ready but not chosen, or held up at fetch and dispatch; "
        "compute: the arithmetic pipe is full or a result is not there yet. Useful arithmetic leaves out padding and "
        "all that is not a product. Of a roofline, both axes are in units of the ridge, where the rates of memory and "
        "of arithmetic meet.",
        measured_in="profile_kernels",
    ),
    TableSpec(
        "architectures",
        "The same kernels on a T4 and on an H200",
        "build_kernels",
        "variant",
        (
            Column("registers, T4", "t4_registers", count),
            Column("H200", "h200_registers", count),
            Column("spilled bytes, T4", "t4_spill_bytes", count),
            Column("H200", "h200_spill_bytes", count),
            Column("shared bytes a block", "shared_bytes", count),
            Column("warps an SM, T4", "t4_warps", count),
            Column("H200", "h200_warps", count),
        ),
        "Registers and spills by the compiler for sm_75 and sm_90a, and the warps that an SM then holds. What a T4 "
        "cannot run is left out.",
        measured_in="build_kernels",
    ),
    TableSpec(
        "attention",
        "Attention alone (packed, workload seed)",
        "bench_attention",
        "precision",
        (
            Column("variant", "variant", text),
            Column("µs", "us", short),
            Column("padded, µs", "padded_us", short),
            Column("best peer", "best_peer", text),
            Column("best peer, µs", "best_peer_us", short),
            Column("against it", "speedup_vs_best_peer", ratio),
            Column("against SDPA, masked", "speedup_vs_sdpa_masked", ratio),
            Column("at its worst input scale", "speedup_at_worst_scale", ratio),
            Column("largest error", "max_abs_error", error),
            Column("SDPA's", "sdpa_max_abs_error", error),
            Column("floor, µs", "floor_us", short),
            Column("share of the floor", "share_of_floor", share),
        ),
        "The floor is the largest of bytes, exponentials and products over the rates measured on this machine. SDPA, "
        "masked, takes padded input and is compared with the padded time. At its worst input scale: the least speed-up "
        "over torch's packed kernel (FlashAttention-2 at 16 bit), of the scales of the inputs that were tried.",
    ),
    TableSpec(
        "drop_in",
        "transformers with only its attention swapped (padded)",
        "integrate_hf",
        "precision",
        (
            Column("ms", "ms", short),
            Column("unmodified, ms", "baseline_ms", short),
            Column("speed-up", "speedup", ratio),
            Column("predicted by Amdahl's law", "predicted_speedup", ratio),
        ),
    ),
    TableSpec(
        "forward",
        "The whole forward pass (workload seed)",
        "bench_rerank",
        "precision",
        (
            Column("ms", "ms", short),
            Column("transformers sdpa, ms", "transformers_sdpa_ms", short),
            Column("packed library, ms", "packed_library_ms", short),
            Column("against transformers", "speedup_vs_transformers_sdpa", ratio),
            Column("against the packed library", "speedup_vs_packed_library", ratio),
        ),
    ),
    TableSpec(
        "rerank",
        "One query from raw text to scores",
        "bench_rerank",
        "precision",
        (
            Column("median, ms", "ms", short),
            Column("p90, ms", "p90_ms", short),
            Column("passages cached, ms", "cached_ms", short),
            Column("sentence-transformers, ms", "cross_encoder_ms", short),
            Column("tuned peer, ms", "tuned_peer_ms", short),
            Column("against sentence-transformers", "speedup_vs_cross_encoder", ratio),
            Column("against the tuned peer", "speedup_vs_tuned_peer", ratio),
            Column("pairs a second, many queries", "pairs_per_s", short),
            Column("sentence-transformers'", "cross_encoder_pairs_per_s", short),
        ),
        "All scorers in one process, interleaved, at the same precision. Speed-ups are theirs / ours.",
    ),
    TableSpec(
        "quality",
        "Ranking quality",
        "evaluate_quality",
        "scorer",
        QUALITY_COLUMNS,
        "The difference is the 95 % bootstrap interval of nDCG@10 against the unmodified fp32 model, paired over "
        "queries. Top ten equal: the share of queries with the unmodified model's ordered top ten, neighbours that "
        "numerical noise can exchange counted as ties. Scorers called stub rank the stub's candidates, the relevant "
        "documents among random others, and are compared with the unmodified model on these.",
        facts=(
            Column("Queries with candidates", "queries_with_results", count),
            Column("judged documents missing from the corpus", "missing_documents", count),
            Column("relevant documents that are among the candidates", "candidates_recall", share),
        ),
        entries=quality_entries,
    ),
    TableSpec(
        "memory",
        "Peak memory",
        "bench_rerank",
        "precision",
        (
            Column("MB", "peak_mb", short),
            Column("unmodified, MB", "baseline_peak_mb", short),
            Column("held by the allocator, MB", "reserved_mb", short),
            Column("unmodified, MB", "baseline_reserved_mb", short),
        ),
    ),
    TableSpec(
        "checks",
        "Checked on the GPU",
        "check_kernels",
        "variant",
        CHECK_COLUMNS,
        "Every case is compared with the reference, from the GPU's own code and from PTX for older GPUs, and a sample "
        "under each tool of compute-sanitizer; a number counts what was found or wrong.",
        entries=check_entries,
    ),
    TableSpec(
        "block",
        "The fused attention block",
        "bench_block",
        "precision",
        (
            Column("µs", "us", short),
            Column("launches", "launches", count),
            Column("unfused, µs", "unfused_us", short),
            Column("unfused launches", "unfused_launches", count),
        ),
        "Batch 4, 512 tokens, width 1024, 16 heads of 64, as `auto` serves it; unfused: LayerNorm, three projections, "
        "SDPA and the output projection in torch's operators.",
    ),
    TableSpec(
        "block_lengths",
        "The fused attention block over lengths",
        "bench_block",
        "precision and tokens",
        (
            Column("variant", "variant", text),
            Column("µs", "us", short),
            Column("launches", "launches", count),
            Column("unfused, µs", "unfused_us", short),
            Column("unfused launches", "unfused_launches", count),
            Column("against it", "speedup_vs_unfused", ratio),
            Column("best backend", "best_peer", text),
            Column("best backend, µs", "best_peer_us", short),
            Column("largest error", "max_abs_error", error),
            Column("unfused", "unfused_max_abs_error", error),
        ),
        "Batch 4, width 1024, 16 heads of 64. The best backend is the quickest of torch's for the unfused block, its "
        "own choice among them.",
        entries=keyed_twice,
    ),
    TableSpec(
        "block_rows",
        "Every variant of the fused attention block",
        "bench_block",
        "precision and variant",
        tuple(
            Column(f"{tokens:,} tokens, µs", f"tokens_{tokens}_us", short)
            for tokens in (128, 256, 512, 1024, 2048, 4096)
        ),
        "Timed beside one another in one process, as the table above.",
        entries=keyed_twice,
    ),
    TableSpec(
        "layernorm",
        "Layer normalisation",
        "bench_block",
        "variant",
        (
            Column("512 rows, µs", "rows_512_us", short),
            Column("torch, µs", "rows_512_torch_us", short),
            Column("16,384 rows, µs", "rows_16384_us", short),
            Column("torch, µs", "rows_16384_torch_us", short),
        ),
        "Rows of 1,024 in fp16.",
    ),
    TableSpec(
        "bert_large",
        "BERT-large, tokens a second",
        "bench_block",
        "sequence",
        (
            Column("tokens/s", "tokens_per_s", count),
            Column("best peer", "best_peer", text),
            Column("best peer, tokens/s", "best_peer_tokens_per_s", count),
            Column("against it", "speedup_vs_best_peer", ratio),
            Column("eager, tokens/s", "eager_tokens_per_s", count),
        ),
    ),
    TableSpec(
        "micro",
        "Attention over lengths and head dims",
        "bench_micro",
        "case",
        (
            Column("variant", "variant", text),
            Column("µs", "us", short),
            Column("best peer", "best_peer", text),
            Column("best peer, µs", "best_peer_us", short),
            Column("against it", "speedup_vs_best_peer", ratio),
            Column("eager, µs", "eager_us", short),
            Column("largest error", "max_abs_error", error),
            Column("SDPA's", "sdpa_max_abs_error", error),
        ),
        "Queries x head dim, batch 4, 16 heads, no mask unless the case says causal. kv: heads of keys and values; "
        "keys: their number where it is not the queries'. Eager is attention in plain operators.",
        entries=keyed_twice,
    ),
    TableSpec(
        "tensorflow",
        "The attention block in TensorFlow",
        "bench_tf",
        "call",
        (
            Column("µs a call", "us", short),
            Column("against Keras’s own", "speedup_vs_stock", ratio),
            Column("launches", "launches", count),
            Column("copies from or to the host", "host_copies", count),
            Column("allocations", "allocations", count),
            Column("waits", "waits", count),
            Column("on TensorFlow’s stream", "on_own_stream", yes),
            Column("largest error", "max_abs_error", error),
        ),
        "Batch 8, width 768, 12 heads. A time is that of a call when calls are queued one behind another, the host's "
        "share included. Launches, copies, allocations and waits are those that the CUDA driver sees during a call; "
        "errors are against float64 on the CPU. Keras’s own: LayerNormalization and MultiHeadAttention, TF32 off.",
        facts=(
            Column("TensorFlow", "version", text),
            Column("cuBLAS under Keras’s own", "cublas", text),
            Column("host copies that the control shows", "control_host_copies", count),
        ),
        entries=tensorflow_entries,
    ),
)


def build_table(spec: TableSpec, summary: Summary, order: Sequence[str] = ()) -> Table | None:
    """The table, or None when the summary has no row for it. Columns that no row has are left out.

    order: the ladder's variants from the first rung on; others follow by name.
    """
    section = summary.get(spec.name, {})
    entries = [
        (label, values)
        for label, values in spec.entries(section, order)
        if any(_cell(column, values) != ABSENT for column in spec.columns)
    ]
    if not entries:
        return None
    columns = [column for column in spec.columns if any(_cell(column, values) != ABSENT for _, values in entries)]
    rows = tuple((label, *(_cell(column, values) for column in columns)) for label, values in entries)
    facts = [f"{fact.heading}: {fact.show(section[fact.key])}" for fact in spec.facts if fact.key in section]
    reasons = [f"{FAILED}, {label}: {reason}" for label, values in entries for reason in failures(values)]
    told = ["; ".join(lines).removesuffix(".") + "." for lines in (facts, reasons) if lines]
    note = " ".join(filter(None, [spec.note, *told]))
    headings = (spec.row_heading, *(column.heading for column in columns))
    return Table(spec.name, spec.title, headings, rows, note, spec.section)


def _cell(column: Column, values: Mapping[str, Any]) -> str:
    """The figure as text; FAIL for the time of what failed its check; a ratio within the spread is called noise."""
    key = column.key
    if key in values:
        noise = key in values.get("noise", ()) or values.get(f"{key}_is_noise", False)
        return column.show(values[key]) + (" (noise)" if noise else "")
    measured = "tilerank" if key == "ms" else key.removesuffix("_ms")
    failed = measured in values.get("failures", {}) or ("failure" in values and key in ("us", "ms"))
    return FAILED if failed else ABSENT


def failures(values: Mapping[str, Any]) -> list[str]:
    """Why rows failed their check: one reason, or one for each of several things measured."""
    several = [f"{name}: {reason}" for name, reason in values.get("failures", {}).items()]
    return [values["failure"], *several] if "failure" in values else several


def build_tables(summary: Summary, order: Sequence[str] = ()) -> tuple[Table, ...]:
    """Every table that the summary has figures for, in the page's order."""
    return tuple(table for spec in TABLES if (table := build_table(spec, summary, order)) is not None)


def headline(summary: Summary) -> tuple[tuple[str, str], ...]:
    """The few figures that a reader looks for first, as (label, value); only those that were measured."""
    found: list[tuple[str, str]] = []

    def add(label: str, key: str, show: Callable[[Any], str]) -> None:
        value = lookup(summary, key)
        if value is not None:
            found.append((label, show(value)))

    for precision in PRECISIONS:
        add(f"one query, raw text to scores, {precision}", f"rerank.{precision}.ms", lambda value: f"{short(value)} ms")
        add(f"against sentence-transformers, {precision}", f"rerank.{precision}.speedup_vs_cross_encoder", ratio)
        add(f"attention against its best peer, {precision}", f"attention.{precision}.speedup_vs_best_peer", ratio)
    add("best rung without tensor cores, against SDPA", "ladder.best_ffma.speedup_vs_sdpa", ratio)
    add("nDCG@10, unmodified model", "quality.baseline_ndcg10", measure)
    for precision in PRECISIONS:
        add(f"nDCG@10, tilerank, {precision}", f"quality.reranker.{precision}.ndcg10", measure)
    add("attention's share of the time", "profile.attention_share", share)
    add("most that a faster attention can gain", "profile.amdahl_ceiling", ratio)
    return tuple(found)


def absent_sections(summary: Summary) -> tuple[TableSpec, ...]:
    """What this record has no figures for."""
    return tuple(spec for spec in TABLES if build_table(spec, summary) is None)


def commit_text(provenance: Mapping[str, Any]) -> str:
    """The commit's first ten digits; changed sources are never passed off as the commit itself."""
    commit = provenance.get("commit")
    if not commit:
        return "sources without a commit"
    return f"commit {commit[:10]}" + (" with changes" if provenance.get("dirty") else "")


def origins(records: Sequence[Record]) -> tuple[tuple[str, str], ...]:
    """(record names, device, driver, torch, commit and date in one line), records of one origin together."""
    together: dict[str, list[str]] = {}
    for record in records:
        values = record.provenance
        parts = [str(values.get("gpu") or values.get("cpu") or "")]
        parts += [f"{name} {values[name]}" for name in ("driver", "torch") if name in values]
        parts += [commit_text(values), str(values.get("time", ""))[:10]]
        together.setdefault(", ".join(filter(None, parts)), []).append(record.name)
    return tuple((", ".join(_few_names(names)), line) for line, names in together.items())


def _few_names(names: Sequence[str]) -> list[str]:
    """``names`` with a stage's records of several variants as one."""
    shown = []
    for stage, group in itertools.groupby(names, key=lambda name: next(filter(name.startswith, PER_VARIANT), name)):
        members = list(group)
        shown += members if len(members) == 1 else [f"{stage.removesuffix('_')} of {len(members)} variants"]
    return shown


def markdown(table: Table, records: Sequence[Record]) -> str:
    """The table, its note and its origin as Markdown."""
    lines = [
        _markdown_row(table.headings),
        "|---|" + "---:|" * (len(table.headings) - 1),
        *(_markdown_row(row) for row in table.rows),
    ]
    if table.note:
        lines += ["", table.note]
    if records:
        lines += ["", "<sub>" + "; ".join(f"{names}: {line}" for names, line in origins(records)) + "</sub>"]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def plain(table: Table, across: int = 3) -> str:
    """The table for a terminal, turned round: figures go down, rows go across, ``across`` of them side by side."""
    lines = [table.title]
    for start in range(0, len(table.rows), across):
        group = table.rows[start : start + across]
        columns = [
            (heading, cells)
            for heading, *cells in zip(table.headings, *group, strict=True)
            if any(cell != ABSENT for cell in cells)
        ]
        label = max(len(heading) for heading, _ in columns)
        widths = [max(len(cells[place]) for _, cells in columns) for place in range(len(group))]
        for heading, cells in columns:
            values = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            lines.append(f"  {heading.ljust(label)}  {values}")
    return "\n".join(lines)


def readme_tables(records: Sequence[Record], predictions: Mapping[str, str] | None = None) -> dict[str, str]:
    """Marker name -> Markdown for every table, and ``headline``; a table without figures says so.

    predictions: variant -> what was expected of it, in ladder order.
    """
    summary, order = analyse(records, predictions or {}), tuple(predictions or ())
    tables = {spec.name: f"*Not recorded on this machine (stage `{spec.stage}`).*" for spec in TABLES}
    for table in build_tables(summary, order):
        tables[table.name] = markdown(table, sources(records, table.section))
    rows = headline(summary)
    first = Table("headline", "Headline", ("figure", "measured"), rows)
    tables["headline"] = markdown(first, ()) if rows else "*Nothing is recorded on this machine yet.*"
    return tables


def ladder_csv(records: Sequence[Record], predictions: Mapping[str, str]) -> str:
    """The timed rungs in ladder order, for plots: variant, microseconds, predicted microseconds where there are any."""
    summary = analyse(records, predictions)
    lines = ["variant,us,predicted_us"]
    for name, values in ladder_entries(summary.get("ladder", {}), tuple(predictions)):
        if "us" in values:
            predicted = lookup(summary, f"predicted.{name}.predicted_us")
            lines.append(f"{name},{values['us']:.1f},{'' if predicted is None else f'{predicted:g}'}")
    return "\n".join(lines) + "\n"


def print_table(records: Sequence[Record]) -> None:
    """Print every table that the records have figures for."""
    tables = build_tables(analyse(records, {}))
    print("\n\n".join(plain(table) for table in tables) if tables else "No figures are recorded here yet.")
