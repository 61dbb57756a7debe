"""`python -m nc10d.warmup` leaves nothing to compile, and shows its progress."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from at_terminal import AtTerminal
from clocks import soon
from hypothesis import given
from hypothesis import strategies as st

import nc10d
from nc10d import warmup
from nc10d.kernels import reduce

WARMUP = [sys.executable, "-m", "nc10d.warmup"]


MODULE = """
import nc10d

@nc10d.reduction("f4")
def warmed(a, b):
    return a - b
"""


@pytest.mark.slow
def test_a_module_of_reductions_is_compiled_too(tmp_path):
    (tmp_path / "warmed_reductions.py").write_text(MODULE)
    folders = os.environ["PYTHONPATH"], str(tmp_path)
    found = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [*WARMUP, "--import", "warmed_reductions"],
        check=True,
        capture_output=True,
        text=True,
        env=found,
    )
    count = len(warmup.tasks()) + 1
    assert f"{count} functions ready" in done.stdout


@pytest.mark.slow
def test_after_the_warm_up_everything_is_loaded():
    done = subprocess.run(WARMUP, check=True, stdout=subprocess.PIPE, text=True)
    *lines, last = done.stdout.splitlines()
    count = len(warmup.tasks())
    assert re.fullmatch(rf"{count} functions ready in \d+\.\d s", last)
    assert all(re.fullmatch(r"\d+ of \d+ functions", line) for line in lines)
    assert lines[-1] == f"{count} of {count} functions"
    check = """
import nc10d
from nc10d import warmup
from nc10d.kernels import cache
def refuse(file, *_): raise AssertionError(file.name + " is compiled")
cache.CodeFile.save_overload = refuse
for name, make in warmup.tasks():
    make()
print(*cache._compiled)
"""
    done = subprocess.run([sys.executable, "-c", check], check=True, stdout=subprocess.PIPE)
    ready = set(done.stdout.decode().split())
    ready |= {name.rpartition(".")[0] for name in ready}
    wanted = {name for path in PACKAGE.rglob("*.py") for name in to_compile(path)}
    assert wanted - USERS <= ready


PACKAGE = Path(nc10d.__file__).parent
USERS = {"nc10d.kernels.own.own_reduce"}
"""Modules that compile users' functions."""


def to_compile(path):
    """Yield the full names of the functions that a module compiles.

    For functions made inside other functions, yield the name of the module.
    """
    module = ".".join(("nc10d", *path.relative_to(PACKAGE).with_suffix("").parts))
    tree = ast.parse(path.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, function in functions.items():
        if any(map(makes_code, function.decorator_list)):
            yield f"{module}.{name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func) == "compile_kernel":
            yield module
        elif makes_code(node.func) and isinstance(made := node.args[0], ast.Name):
            yield f"{module}.{made.id}" if made.id in functions else module


def makes_code(node):
    words = ("compiled", "compiled_callback", "on_demand")
    return isinstance(node, ast.Call) and ast.unparse(node.func) in words


def test_what_is_made_for_an_image_can_be_read_by_all_and_written_by_nobody_else(tmp_path):
    (tmp_path / "code").mkdir(mode=0o700)
    (tmp_path / "code" / "f.code").touch(mode=0o600)
    warmup.let_all_read(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"code": 0o755, "f.code": 0o644}


def test_a_place_for_an_image_that_cannot_be_used_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        warmup.main(["--to", str(tmp_path / "file")])
    assert "is not a folder" in capsys.readouterr().err


def test_every_way_to_make_compiled_code_is_seen():
    assert len([*to_compile(PACKAGE / "backend/cpu/native/sockets.py")]) == 3
    pack = "nc10d.kernels.pack"
    assert sorted(to_compile(PACKAGE / "kernels/pack.py")) == [pack, pack, f"{pack}._move_rows"]
    assert [*to_compile(PACKAGE / "kernels/streaming.py")] == ["nc10d.kernels.streaming"]


DEFERRED = """
import numpy as np, nc10d as dist
from nc10d.kernels import cache
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(np.ones(2))
print(*sorted(cache._compiled))
"""


def test_a_program_compiles_only_the_functions_that_it_uses():
    done = subprocess.run([sys.executable, "-c", DEFERRED], check=True, stdout=subprocess.PIPE)
    names = {name.rpartition(".")[2] for name in done.stdout.decode().split()}
    assert {"_advance", "_run", "_drive", "_break_channel"} <= names
    assert not names & {"_submit", "_wait", "_work", "_run_message", "_read_arrays"}
    assert "_advance_rare" not in names


LOADED = """
import sys
import numba, numpy as np, nc10d as dist
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(np.ones(2))
print("numba.np.linalg" in sys.modules)

@numba.njit
def of_the_user(x):
    found = [hash(i) for i in range(3)]
    return np.sort(x)[0] + len(found)

print(of_the_user(np.array([4.0, 1.0])))
"""


@pytest.mark.slow
def test_compiled_functions_load_without_all_of_numba():
    run = [sys.executable, "-c", LOADED]
    for _ in range(2):  # the first may have to compile
        done = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["False", "4.0"]


def test_every_kernel_has_a_task_of_its_own():
    names = [name for name, _ in reduce.every_kernel()]
    assert len(names) == len(set(names)) > 50


@given(st.integers(1, 100), st.integers(1, 12))
def test_the_shares_of_all_processes_are_all_tasks(count, jobs):
    tasks = [(str(number), print) for number in range(count)]
    dealt = [task for share in range(jobs) for task in warmup.deal(tasks, share, jobs)]
    assert sorted(dealt, key=tasks.index) == tasks


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.randoms())
def test_the_count_grows_to_all(shares, random):
    reports = [iter([f"+{share}\n", *["name\n"] * share]) for share in shares]
    turns = [
        report for report, share in zip(reports, shares, strict=True) for _ in range(share + 1)
    ]
    random.shuffle(turns)
    shown = []
    lines = map(next, turns)
    assert warmup.follow(lines, len(shares), lambda *pair: shown.append(pair)) == sum(shares)
    ready, totals = zip(*shown, strict=True)
    assert set(totals) == {sum(shares)}
    assert [*ready] == [*range(ready[0], sum(shares) + 1)]


def test_a_few_lines_show_many_steps(capsys):
    show = warmup.in_lines()
    for ready in range(83):
        show(ready, 82)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == warmup.LINES
    assert lines[-1] == "82 of 82 functions"


def test_on_a_terminal_a_bar_grows():
    with AtTerminal([*WARMUP, "--jobs", "1"]) as terminal:
        terminal.read_until("compiling")
        terminal.read_until("100%")
        terminal.read_until("functions ready")


def test_ctrl_c_ends_the_command_without_output():
    def attempt():
        with AtTerminal(WARMUP) as terminal:
            terminal.read_until("compiling")
            code, seconds = terminal.interrupt()
        assert code == 130
        assert "Traceback" not in terminal.screen
        return seconds

    assert soon(1.0, attempt)


@pytest.mark.parametrize("jobs", ["0", "-1", "two"])
def test_a_senseless_number_of_processes_is_refused(jobs, capsys):
    with pytest.raises(SystemExit) as ended:
        warmup.main(["--jobs", jobs])
    assert ended.value.code == 2
    assert "--jobs" in capsys.readouterr().err


def test_a_failed_process_is_counted():
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    words = [*WARMUP, "--jobs", "2"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unset NUMBA_DISABLE_JIT" in done.stderr
    assert "functions ready" not in done.stdout
