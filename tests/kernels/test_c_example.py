"""The interface as C sees it: the example program, and that Python's structs are C's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from kernels import abi

from tilerank.kernels import build, library

COMPILER = shutil.which("gcc") or shutil.which("cc")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


def compiled(source: Path, program: Path, repository: Path, *libraries: str) -> Path:
    command = abi.compile_c(str(COMPILER), source, program, repository / "cuda" / "include", *libraries)
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return program


def test_the_example_in_c_compiles_without_a_warning_and_runs(repository: Path, tmp_path: Path) -> None:
    built = build.build(build.Target("cpu"))
    shutil.copy(built.path, tmp_path / "libtilerank.so")
    source = repository / "cuda" / "examples" / "attention.c"
    program = compiled(source, tmp_path / "example", repository, f"-L{tmp_path}", "-ltilerank", "-lm")
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    answer = subprocess.run([program], capture_output=True, text=True, env=environment, check=False)
    lines = answer.stdout.splitlines()
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert lines[0] == f"build {built.build_id}, backend cpu, variants: reference"
    assert "nan" not in answer.stdout, "what lies beyond a sequence's length must not reach the result"
    # The second sequence has one key: its value, 0 in head 0 and 10 in head 1, is every row's result.
    assert lines[4:7] == [f"out[1][{row}] = 0.0000 10.0000" for row in range(3)]
    assert lines[7] == "head_dim 512: status 1, head_dim is 512; allowed: 1 to 256"


def test_the_example_of_the_block_in_c_gives_what_can_be_worked_out_by_hand(repository: Path, tmp_path: Path) -> None:
    built = build.build(build.Target("cpu"))
    shutil.copy(built.path, tmp_path / "libtilerank.so")
    source = repository / "cuda" / "examples" / "fused_attention.c"
    program = compiled(source, tmp_path / "example", repository, f"-L{tmp_path}", "-ltilerank", "-lm")
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    answer = subprocess.run([program], capture_output=True, text=True, env=environment, check=False)
    lines = answer.stdout.splitlines()
    assert answer.returncode == 0, answer.stdout + answer.stderr
    # The normalised first token, (c - 2.5) / sqrt(1.25), is all that the second sequence sees.
    assert lines[3:6] == [f"out[1][{row}] = -1.3416 -0.4472 0.4472 1.3416" for row in range(3)]
    rows = [[float(number) for number in line.split("=")[1].split()] for line in lines[:3]]
    for row in rows:  # tokens 0 and 2 are alike and token 1 is their opposite: each row is a part of the first token
        assert all(abs(number) <= 1.3416 for number in row)
        assert row[0] == -row[3]
    assert rows[0] == rows[2] != rows[1]
    assert lines[6] == "num_heads 0: status 1, num_heads is 0; it must be 1 or more"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tilerank_attention_params", library.AttentionParams),
        ("tilerank_attention_varlen_params", library.AttentionVarlenParams),
        ("tilerank_variant", library._VariantStruct),
    ],
)
def test_python_structs_lie_in_memory_as_c_has_them(
    repository: Path, tmp_path: Path, name: str, kind: type[library.AttentionParams]
) -> None:
    members = [member for member, *_ in kind._fields_]
    lines = [f"  SHOW({name}, {member});" for member in members]
    source = tmp_path / "layout.c"
    source.write_text(
        "\n".join(
            [
                "#include <stdio.h>",
                '#include "tilerank.h"',
                '#define SHOW(kind, m) printf(", \\"%s\\": [%zu, %zu]", #m, offsetof(kind, m), sizeof(((kind*)0)->m))',
                "int main(void) {",
                f'  printf("{{\\"\\": [0, %zu]", sizeof({name}));',
                *lines,
                '  printf("}\\n");',
                "  return 0;",
                "}",
            ]
        ),
        encoding="utf-8",
    )
    program = compiled(source, tmp_path / "layout", repository)
    answer = json.loads(subprocess.run([program], capture_output=True, text=True, check=True).stdout)
    assert {member: (field.offset, field.size) for member, field in abi.layout_of(kind).items()} == {
        member: tuple(values) for member, values in answer.items()
    }
    declared = (repository / "cuda" / "include" / "tilerank.h").read_text(encoding="utf-8")
    body = declared.split(f"typedef struct {name} {{", 1)[1].split(f"}} {name};", 1)[0]
    semicolons = "".join(line.split("/*")[0] for line in body.splitlines()).count(";")
    assert semicolons == len(members), "every member of the C struct is in the Python one"
