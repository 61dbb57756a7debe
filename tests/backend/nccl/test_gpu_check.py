"""`make gpu-check` runs to its end, over the emulators, and can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import emulators, needs_emulators

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))
from gpu_claims import CLAIMS  # noqa: E402

pytestmark = needs_emulators
TESTS = ["backend/nccl", "backend/staged", "torch", "emulators"]
FOLDERS = ["", "tools", *(f"tests/{name}" for name in TESTS)]


def python(code: str, where: Path, *more: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a folder; `more` are import paths that come before the script's own."""
    paths = [*map(str, more), *(str(ROOT / name) for name in FOLDERS)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    script = where / "code.py"
    script.write_text(code)
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )


def check(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a folder, where it leaves its results."""
    command = ["bash", str(ROOT / "tools" / "gpu_check.sh"), *arguments]
    environment = os.environ | {"PYTHON": sys.executable, "GPU_CHECK_RESULTS": str(where)}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=950, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_gpu_check_runs_in_full(tmp_path: Path) -> None:
    with emulators(NC10D_EMULATED_GPUS="1"):
        done = check(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu-results.json").read_text())["rows"]
    assert not [row for row in rows if row["failed"]]
    assert not [row for row in rows if "no time was left" in row["result"]]
    assert "passes over the emulators; not yet run on a GPU" in done.stdout
    assert f"0 of {len(CLAIMS)} claims are now shown on a GPU" in done.stdout
    # Every claim has its rows, but for what this machine lacks.
    names = [row["name"] for row in rows]
    torchs = (
        "torch",
        "cupy",
        "by nccl",
        "by staged",
        "_precision",
        "zero_",
        "objects_",
        "CPU time",
    )
    for claim in CLAIMS:
        for part in claim.rows:
            lacking = any(word in part for word in torchs) or part == "all_reduce of"
            assert lacking or any(part in name for name in names), (claim.text, part)


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    done = check(tmp_path, "--quik")
    assert done.returncode == 2
    assert "unrecognized arguments: --quik" in done.stderr


def test_without_a_gpu_every_line_tells_that_it_has_not_run(tmp_path: Path) -> None:
    done = check(tmp_path)
    if "No GPU" not in done.stdout:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("     ")]
    assert len(lines) > len(CLAIMS)
    assert all("not yet run on a GPU" in line or "no row checks it" in line for line in lines)
    assert f"0 of {len(CLAIMS)} claims are now shown" in done.stdout


FAILING = """
import gpu_check, os, signal, sys, time
from gpu_rows import Row
gpu_check.MOST_SECONDS = 5.0
checks = {
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raises": lambda: 1 / 0,
    "hangs": lambda: time.sleep(100),
    "passes": lambda: [Row("it", "ok")],
}

def begins():
    yield Row("the first law", "ok")
    time.sleep(100)

def breaks():
    yield Row("a law before", "ok")
    os.kill(os.getpid(), signal.SIGKILL)

checks |= {"begins": begins, "breaks": breaks}
gpu_check.parts = lambda quick: {"checks": checks}
gpu_check.__file__ = __file__
if "--check" in sys.argv:
    from pathlib import Path
    at = sys.argv.index("--check")
    gpu_check.one(sys.argv[at + 1], Path(sys.argv[at + 2]), False)
else:
    print(gpu_check.main([]))
"""


def test_a_check_that_dies_or_hangs_keeps_its_rows_and_the_others_run(tmp_path: Path) -> None:
    with emulators(NC10D_EMULATED_GPUS="1"):
        done = python(FAILING, tmp_path)
    assert "its process ended with -9, after 0 rows" in done.stdout, done.stdout + done.stderr
    assert "     the first law" in done.stdout
    assert "did not end within 5 s, after 1 rows" in done.stdout
    assert "     a law before" in done.stdout
    assert "its process ended with -9, after 1 rows" in done.stdout
    assert "ZeroDivisionError" in done.stdout
    assert "did not end within 5 s" in done.stdout
    assert "     it" in done.stdout
    assert done.stdout.rstrip().endswith("5")


NO_TIME = """
import gpu_check
gpu_check.ALL_SECONDS = 0.0
print(gpu_check.main(["--quick"]))
"""


def test_checks_that_no_time_is_left_for_do_not_run_and_are_no_failures(tmp_path: Path) -> None:
    with emulators(NC10D_EMULATED_GPUS="1"):
        done = python(NO_TIME, tmp_path)
    assert done.stdout.count("not run: no time was left") > 10, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("0")


VERSION = """
import os, gpu_rows, nc10d
found = [gpu_rows.version() == nc10d.__version__]
os.environ["PATH"] = ""
print(*found, gpu_rows.version() == nc10d.__version__)
"""


def test_neither_git_nor_its_folder_is_needed(tmp_path: Path) -> None:
    with emulators():
        assert python(VERSION, tmp_path).stdout == "True True\n"


TORCHS = """
import gpu_times
(row,) = gpu_times.torch_rows(gpu_times.QUICK)
print(row.failed, row.result)
"""


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        ("raise OSError('libcudart.so: not found')", "True OSError: libcudart.so: not found"),
        ("", "True "),  # an empty module in torch's place
    ],
)
def test_a_torch_that_does_not_work_is_a_failure(tmp_path: Path, torch: str, expected: str) -> None:
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(torch)
    with emulators():
        done = python(TORCHS, tmp_path, package.parent)
    assert done.stdout.startswith(expected), done.stdout + done.stderr


def test_a_check_that_raises_is_a_failed_row(tmp_path: Path) -> None:
    code = "import gpu_rows\nprint([row.failed for row in gpu_rows.run('it', lambda: 1 / 0)])"
    nothing = "\nprint([row.failed for row in gpu_rows.run('it', lambda: [])])"
    with emulators():
        done = python(code + nothing, tmp_path)
    assert done.stdout == "[True, False]\n" * 2, done.stderr
