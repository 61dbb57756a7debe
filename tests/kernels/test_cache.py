"""Compiled code is compiled once, loaded right, and never mistaken for other code."""

import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest

from nc10d.backend.cpu.native import entry_points
from nc10d.kernels.cache import made_once

# Compile (or load) kernels in the given order, check a result of each, and print whether each was
# loaded. Processes start together: each waits for the end of its standard input.
WORKER = """
import ctypes, json, sys
import numpy as np
from nc10d.arrays.dtypes import DType
from nc10d.kernels import reduce

RESULT = {"SUM": 8, "PRODUCT": 15, "MIN": 3, "MAX": 5, "BAND": 1, "BOR": 7, "BXOR": 6}
CALL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)

def check(kind, dtype):
    three, five = np.full(50, 3, dtype.numpy), np.full(50, 5, dtype.numpy)
    address = reduce.kernel_address(kind, dtype)
    CALL(address)(three.ctypes.data, three.ctypes.data, five.ctypes.data, three.nbytes)
    assert (three == RESULT[kind]).all(), (kind, dtype, three)

pairs = [(kind, DType(tuple_)) for kind, tuple_ in
         ((k, next(d.value for d in DType if d.label == label)) for k, label in
          json.loads(sys.argv[1]))]
sys.stdin.read()
for pair in pairs:
    check(*pair)
print(json.dumps({k: v.cache_hits for k, v in reduce._kernels.items()}))
"""
PAIRS = [(k, d) for k in ("SUM", "PRODUCT", "MAX") for d in ("int8", "int32", "float32")]
PAIRS += [("SUM", "bfloat16")]


def start(pairs, cache, **more):
    run = [sys.executable, "-c", WORKER, json.dumps(pairs)]
    env = os.environ | {"NC10D_CACHE_DIR": str(cache)} | more
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(run, env=env, text=True, **pipes)


def finish(worker):
    out, error = worker.communicate()
    assert worker.returncode == 0, error
    return json.loads(out)


def code_files(cache):
    return sorted(cache.glob("*/*.code"))


@pytest.mark.slow
def test_racing_processes_compile_each_kernel_once_and_right(tmp_path):
    orders = [PAIRS, PAIRS[::-1], PAIRS[5:] + PAIRS[:5], PAIRS[::2] + PAIRS[1::2]]
    workers = [start(order, tmp_path) for order in orders]
    for worker in workers:
        worker.stdin.close()
        worker.stdin = None
    loaded = [finish(worker) for worker in workers]
    for name in loaded[0]:
        assert sum(not each[name] for each in loaded) == 1, f"{name} was compiled again"
    later = finish(start(PAIRS, tmp_path))
    assert all(later.values())


TOGETHER = """
import sys
from nc10d.backend.cpu.native import entry_points
from nc10d.kernels import cache
save = cache.CodeFile.save_overload
made = []
cache.CodeFile.save_overload = lambda file, *rest: (made.append(file.name), save(file, *rest))
print("ready", flush=True)
sys.stdin.read()
entry_points.prepare()
print(*made)
"""


@pytest.mark.slow
def test_ranks_that_begin_together_share_the_compiling(tmp_path):
    env = os.environ | {"NC10D_CACHE_DIR": str(tmp_path)}
    run = partial(subprocess.Popen, [sys.executable, "-c", TOGETHER], env=env, text=True)
    workers = [run(stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.close()
        worker.stdin = None
    shares = [set(worker.communicate()[0].split()) for worker in workers]
    assert all(shares)
    assert not shares[0] & shares[1]
    names = {name.rpartition(".")[2] for name in shares[0] | shares[1]}
    assert names == {
        "_advance",
        *(f"_{name}" for name in (*entry_points.FIRST, *entry_points.ESSENTIAL)),
    }
    assert all(worker.returncode == 0 for worker in workers)


@pytest.mark.slow
def test_damaged_files_are_compiled_again(tmp_path):
    pairs = [(kind, "uint32") for kind in ("MAX", "MIN", "PRODUCT", "SUM")]
    finish(start(pairs, tmp_path))
    largest, smallest, product, total = code_files(tmp_path)
    good = total.read_bytes()
    largest.write_bytes(good)  # complete code of another kernel
    smallest.write_bytes(good[:500] + bytes([good[500] ^ 1]) + good[501:])
    product.write_bytes(good[:-100])
    loaded = {"max_uint32": 0, "min_uint32": 0, "product_uint32": 0, "sum_uint32": 1}
    assert finish(start(pairs, tmp_path)) == loaded
    assert all(finish(start(pairs, tmp_path)).values())


@pytest.mark.slow
def test_a_killed_compiler_leaves_nothing_wrong(tmp_path):
    victim = start(PAIRS, tmp_path)
    victim.stdin.close()
    while len(code_files(tmp_path)) < 2:  # kill it amid its work
        assert victim.poll() is None
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    victim.stderr.close()
    finish(start(PAIRS, tmp_path))


def test_the_users_own_numba_cache_is_left_alone(tmp_path):
    numba_cache = tmp_path / "numba"
    finish(start([("SUM", "int32")], tmp_path / "code", NUMBA_CACHE_DIR=str(numba_cache)))
    assert not numba_cache.exists()
    assert len(code_files(tmp_path / "code")) == 1


def test_compiled_code_works_without_a_writable_disk(tmp_path):
    full = "/dev/full/nowhere"  # can't be created, so the temporary folder is used
    env = {"TMPDIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    assert finish(start([("SUM", "int32")], full, **env)) == {"sum_uint32": 0}


ENGINE_LIKE = """
import sys
from numba import njit
from nc10d.kernels.cache import compiled, entry_point

@njit(nogil=True)
def twice(x):
    return x * FACTOR

@compiled("int64(int64, int64)")
def add_twice(x, y):
    return x + twice(y)

print(entry_point(add_twice)(1, 2), sum(add_twice.stats.cache_hits.values()))
"""


def run_module(tmp_path, factor):
    script = tmp_path / "engine_like.py"
    script.write_text(ENGINE_LIKE.replace("FACTOR", str(factor)))
    env = os.environ | {"NC10D_CACHE_DIR": str(tmp_path / "code")}
    done = subprocess.run([sys.executable, script], env=env, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode().split()


def test_an_entry_point_is_loaded_until_its_module_changes(tmp_path):
    assert run_module(tmp_path, 2) == ["5", "0"]
    assert run_module(tmp_path, 2) == ["5", "1"]
    assert run_module(tmp_path, 10) == ["21", "0"]


def test_disabled_jit_is_named_as_the_cause(tmp_path):
    worker = start([("SUM", "int32")], tmp_path, NUMBA_DISABLE_JIT="1")
    _, error = worker.communicate()
    assert "unset NUMBA_DISABLE_JIT" in error


TELLER = """
import logging, sys
from nc10d.kernels.cache import compiled

def first(x):
    return x + 1

def second(x):
    return x + 2

if "silent" in sys.argv:
    logging.getLogger("nc10d").setLevel(logging.ERROR)
input()
for function in (first, second) if "forward" in sys.argv else (second, first):
    compiled("int64(int64)")(function)
print("ready", flush=True)
input()
"""


def outputs_of(tmp_path, *processes):
    """Start processes that need the same code, each with its argument; return their outputs."""
    script = tmp_path / "teller.py"
    script.write_text(TELLER)
    env = os.environ | {"NC10D_CACHE_DIR": str(tmp_path / "code")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen([sys.executable, script, words], env=env, text=True, **pipes)
        for words in processes
    ]
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in started:
        assert process.stdout.readline() == "ready\n"
    ends = [process.communicate("end\n", timeout=60) for process in started]
    return [error for _, error in ends if error]


def test_one_process_reports_that_it_compiles_and_none_if_all_code_is_cached(tmp_path):
    (line,) = outputs_of(tmp_path, "forward", "backward")
    assert line.startswith("nc10d: compiling its engine for this machine, once;")
    assert line.count("\n") == 1
    assert outputs_of(tmp_path, "forward", "backward") == []


def test_a_program_can_silence_the_report_by_its_log(tmp_path):
    assert outputs_of(tmp_path, "silent") == []


def test_a_kernel_is_compiled_without_a_word(tmp_path):
    worker = start([("SUM", "int32")], tmp_path)
    assert worker.communicate()[1] == ""
    assert worker.returncode == 0


def test_threads_that_ask_at_once_share_the_first_threads_result():
    made, makers = {}, []

    def second():
        assert made_once(made, "kernel", lambda: makers.append("second")) == "a kernel"

    def make():
        makers.append("first")
        other.start()
        other.join(0.2)  # the other thread must wait for this maker
        return "a kernel"

    other = threading.Thread(target=second)
    assert made_once(made, "kernel", make) == "a kernel"
    other.join()
    assert makers == ["first"]
