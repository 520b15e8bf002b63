"""Write what the build needs from registry.yaml: one C table an operation, and the list of sources for CMake.

    python3 generate_table.py registry.yaml --backend cuda --archs "80-real;90a-real" --out build/generated

Runs under any Python 3.9 or later that has ruamel.yaml or PyYAML; knows nothing of the tilerank package.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

DEVICES = {"cpu": "TILERANK_DEVICE_CPU", "cuda": "TILERANK_DEVICE_CUDA"}
DTYPES = {name: f"(1u << TILERANK_{name.upper()})" for name in ("fp32", "fp16", "bf16")}
LAYOUTS = {name: f"TILERANK_LAYOUT_{name.upper()}" for name in ("padded", "packed")}
MASKS = {name: f"TILERANK_SERVES_{name.upper()}" for name in ("key_lengths", "causal", "boolean", "additive")}


def read_registry(path: Path) -> dict:
    """The ``variants`` section: operation -> row name -> row."""
    text = path.read_text(encoding="utf-8")
    try:
        from ruamel.yaml import YAML

        return YAML(typ="safe").load(text)["variants"]
    except ImportError:
        pass
    try:
        import yaml
    except ImportError:
        sys.exit(f"{sys.executable} can read no YAML, which {path} is: pip install ruamel.yaml")
    return yaml.safe_load(text)["variants"]


def highest_arch(archs: str) -> int:
    """90 for ``"75-real;90a-real"``: the capability times ten of the newest entry."""
    return max((int("".join(filter(str.isdigit, arch))) for arch in archs.split(";") if arch), default=0)


def rows_for(backend: str, archs: str, rows: dict) -> dict:
    """The rows that a build holds: cpu, those of host code; host, also those that the emulator runs; cuda, also those
    that one of its architectures can run."""

    def held(row: dict) -> bool:
        if row["device"] == "cpu":
            return True
        if backend == "host":
            return "host_exempt" not in row
        return backend == "cuda" and int(row["min_sm"]) <= highest_arch(archs)

    return {name: row for name, row in rows.items() if held(row)}


def bits(row_name: str, field: str, values: list, names: dict) -> str:
    """Enumerators joined by ``|``."""
    unknown = [value for value in values if value not in names]
    if unknown:
        sys.exit(f"registry.yaml: {row_name}: {field} has {unknown}; allowed: {list(names)}")
    return " | ".join(names[value] for value in values) or "0"


def operation_table(operation: str, rows: dict) -> str:
    """The C++ source of one operation's table."""
    kind = operation.title().replace("_", "")
    declarations, arrays, entries = [], [], []
    for name, row in rows.items():
        where = f"{operation}.{name}"
        function = f"{operation}_{name}"
        declarations.append(f"tilerank_status {function}(const {kind}Args& args, void* workspace, void* stream);")
        workspace = "nullptr"
        if row.get("workspace"):
            workspace = f"{function}_workspace"
            declarations.append(f"size_t {workspace}(const {kind}Args& args);")
        head_dims, count = "nullptr", 0
        if row["head_dims"] != "any":
            head_dims, count = f"k_{name}_head_dims", len(row["head_dims"])
            values = ", ".join(str(int(value)) for value in row["head_dims"])
            arrays.append(f"const int32_t {head_dims}[] = {{{values}}};")
        fields = [
            f'"{name}"',
            f'"{row["file"]}"',
            bits(where, "device", [row["device"]], DEVICES),
            str(int(row["min_sm"])),
            bits(where, "dtypes", row["dtypes"], DTYPES),
            bits(where, "layouts", row["layouts"], LAYOUTS),
            bits(where, "masks", row["masks"], MASKS),
            str(count),
            head_dims,
            str(int(row.get("max_k_len", 0))),
        ]
        entries += ["    {{", *(f"         {field}," for field in fields), f"     }}, {function}, {workspace}}},"]
    lines = [
        "// Generated from registry.yaml by generate_table.py.",
        f'#include "common/{operation}.h"',
        "",
        "namespace tilerank {",
        "",
        *declarations,
        "",
        *arrays,
        f"const {kind}Variant k{kind}Variants[] = {{",
        *entries,
        "};",
        f"const int32_t k{kind}VariantCount = {len(rows)};",
        "",
        "}  // namespace tilerank",
        "",
    ]
    return "\n".join(lines)


def parts_of(source: Path, file: str) -> dict:
    """What a file is compiled as: name -> content of a file a part (common/parts.h), or nothing where it has none."""
    path = source / file
    text = path.read_text(encoding="utf-8") if path.suffix == ".cu" and path.exists() else ""
    names = set(re.findall(r"\bTILERANK_PART_(\d)\b", text))
    stem = file.rsplit(".", 1)[0].replace("/", "_")
    return {
        f"{stem}_{part}.cu": f'#define TILERANK_PART {part}\n#include "{file}"\n' for part in sorted(map(int, names))
    }


def cmake_lists(tables: dict, parts: dict) -> str:
    """CMake code: every file to compile, once, and the lowest architecture of each. ``parts``: file -> what to compile
    in its place."""
    lowest: dict[str, int] = {}
    for rows in tables.values():
        for row in rows.values():
            for file in parts.get(row["file"]) or (row["file"],):
                lowest[file] = min(int(row["min_sm"]), lowest.get(file, sys.maxsize))
    return "\n".join(
        [
            "# Generated from registry.yaml by generate_table.py.",
            f"set(TILERANK_OPERATIONS {' '.join(tables)})",
            f"set(TILERANK_VARIANT_FILES {' '.join(lowest)})",
            *(f'set("TILERANK_MIN_SM_{file}" {sm})' for file, sm in lowest.items()),
            "",
        ]
    )


def write_if_changed(path: Path, text: str) -> None:
    """Leave the time of an unchanged file alone: nothing is then compiled again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("registry", type=Path)
    parser.add_argument("--backend", choices=("cuda", "host", "cpu"), required=True)
    parser.add_argument("--archs", default="", help="CMake's list of CUDA architectures")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    registry = read_registry(options.registry)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        tables = {name: rows_for(options.backend, options.archs, rows) for name, rows in registry.items()}
        for operation, rows in tables.items():
            write_if_changed(options.out / f"{operation}_table.cc", operation_table(operation, rows))
        files = {row["file"] for rows in tables.values() for row in rows.values()}
        parts = {}
        for file in files if options.backend == "cuda" else ():
            contents = parts_of(options.registry.resolve().parent, file)
            for name, text in contents.items():
                write_if_changed(options.out / name, text)
            parts[file] = [(options.out.resolve() / name).as_posix() for name in contents]
        write_if_changed(options.out / "variants.cmake", cmake_lists(tables, parts))
    except KeyError as error:
        sys.exit(f"{options.registry}: a row lacks the key {error}")


if __name__ == "__main__":
    main()
