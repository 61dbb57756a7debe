"""The command line: arguments in, a request out."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nc10d.errors import UnsupportedPlatform
from nc10d.run.cli import main
from nc10d.run.environment import rank_variables
from nc10d.run.launch_options import DEFAULT_PORT, parse_endpoint, read
from nc10d.run.processes import RankProcesses


def test_one_node_needs_no_options() -> None:
    request = read(["train.py", "--lr", "3", "--nproc-per-node", "9"])
    assert request.job.world_size == 1
    assert request.job.master_port == 0
    assert request.command == (
        *(sys.executable, "-u", "train.py"),
        *("--lr", "3", "--nproc-per-node", "9"),
    )


@pytest.mark.parametrize("dash", ["-", "_"])
def test_options_may_be_spelled_with_dashes_or_underscores(dash: str) -> None:
    words = ["--nproc-per-node=3", "--max-restarts=2", "--rdzv-id=x"]
    job = read([f"--{word[2:].replace('-', dash)}" for word in words] + ["a.py"]).job
    assert (job.nproc, job.max_restarts, job.run_id) == (3, 2, "x")


def test_several_nodes_find_each_other_at_the_endpoint() -> None:
    words = "--nnodes 2 --node-rank 1 --nproc-per-node 4 --rdzv-endpoint there:4711 a.py"
    job = read(words.split()).job
    assert (job.master_addr, job.master_port) == ("there", 4711)
    assert [job.global_rank(i) for i in range(4)] == [4, 5, 6, 7]


def test_the_endpoint_may_come_in_two_options() -> None:
    words = "--nnodes 2 --node-rank 0 --master-addr h --master-port 1 a.py"
    job = read(words.split()).job
    assert (job.master_addr, job.master_port) == ("h", 1)


def test_module_and_program_are_started_as_such() -> None:
    assert read(["-m", "json.tool"]).command == (sys.executable, "-u", "-m", "json.tool")
    assert read(["--no-python", "true", "-x"]).command == ("true", "-x")


def test_output_goes_to_the_requested_place() -> None:
    output = read(["--log-dir", "logs", "--redirects", "2", "--no-prefix", "a.py"]).output
    assert (output.log_dir, output.hidden(0), output.prefixed) == (
        Path("logs"),
        (False, True),
        False,
    )


def test_output_is_chosen_by_rank() -> None:
    output = read(["--log-dir", "logs", "-r", "0:1,2:3", "--local-ranks-filter", "0,2", "a"]).output
    hidden = [output.hidden(local_rank) for local_rank in range(3)]
    assert hidden == [(True, False), (True, True), (True, True)]


@pytest.mark.parametrize("words", [["-r", "3"], ["-t", "0:1"]])
def test_without_a_folder_output_is_kept_in_a_new_one(words: list[str]) -> None:
    request = read([*words, "a.py"])
    assert request.output.log_dir is not None
    request.output.log_dir.rmdir()
    assert request.notes == (f"the ranks' output is kept in {request.output.log_dir}",)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("show.py -- --r=1", ["show.py", "--", "--r=1"]),
        ("-- show.py --r=1", ["show.py", "--r=1"]),
        ("--nproc-per-node 2 -- show.py -- -h", ["show.py", "--", "-h"]),
        ("show.py -m a --nnodes 3 --", ["show.py", "-m", "a", "--nnodes", "3", "--"]),
    ],
)
def test_the_scripts_arguments_are_its_own(words: str, given: list[str]) -> None:
    assert list(read(words.split()).command[2:]) == given


def test_every_option_of_torchrun_that_applies_is_taken() -> None:
    words = (
        "--nproc_per_node cpu --rdzv_backend c10d --rdzv_id x --rdzv_endpoint localhost:0"
        " --rdzv_conf timeout=7,is_host=true --max_restarts 1 --monitor_interval 5"
        " --start_method spawn --role r --log_dir d --redirects 0 --tee 3 --local_ranks_filter 0"
        " --local_addr 10.0.0.1 --signals_to_handle SIGTERM,usr1 --shutdown_timeout 9"
        " -m a"
    )
    request = read(words.split())
    assert request.job.nproc == len(os.sched_getaffinity(0))
    assert rank_variables(request.job, 0, 0)["NC10D_SOCKET_ADDRESS"] == "10.0.0.1"
    assert (request.patience, request.grace) == (7, 9)
    assert request.signals == (signal.SIGTERM, signal.SIGUSR1)
    (note,) = request.notes
    assert note.startswith("without meaning here: --monitor-interval (")
    assert "--start-method (" in note
    assert "is_host of --rdzv-conf" in note


def test_a_rank_for_each_device_needs_devices(tmp_path: Path, monkeypatch: Any) -> None:
    """A libcuda of our own stands in for the driver."""
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so"
    source.write_text("int cuInit(int f){return 0;} int cuDeviceGetCount(int*n){*n=3;return 0;}")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("NC10D_CUDA_LIBRARY", str(library))
    assert [read(["--nproc-per-node", how, "a"]).job.nproc for how in ("gpu", "auto")] == [3, 3]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--nproc-per-node 0 a.py",
        "--nproc-per-node -1 a.py",
        "--master-port 65536 a.py",
        "--master-port x a.py",
        "--grace-period -3 a.py",
        "--grace-period nan a.py",
        "--nproc-per-node 2 --local-ranks-filter 2 a.py",
        "--nnodes 2 a.py",
        "--nnodes 2 --node-rank 0 a.py",
        "--rdzv-backend etcd a.py",
        "--rdzv-conf timeout a.py",
        "--rdzv-conf timeout=x a.py",
        "--signals-to-handle SIGNONE a.py",
        "--signals-to-handle SIGKILL a.py",
        "--local-ranks-filter x a.py",
        "--nproc-per-node tpu a.py",
        "--nnodes x a.py",
        "--",
        "--nnodes 2 --node-rank 2 --rdzv-endpoint h a.py",
        "--nnodes 2 --node-rank 0 --standalone a.py",
        "--nnodes 1:4 a.py",
        "--redirects 4 a.py",
        "--redirects a:1 a.py",
        "--no-python -m a",
        "--rdzv-endpoint h:port a.py",
        "--unheard-of a.py",
    ],
)
def test_senseless_arguments_end_with_code_2(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        read(words.split())
    assert ending.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h", ("h", DEFAULT_PORT)),
        ("h:1", ("h", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:7", ("::1", 7)),
        ("[::1]", ("::1", DEFAULT_PORT)),
        ("fe80::1", ("fe80::1", DEFAULT_PORT)),
    ],
)
def test_endpoints_are_cut_at_the_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_endpoint(text, DEFAULT_PORT) == expected


@pytest.mark.parametrize("text", ["", ":1", "h:x", "h:65536"])
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_endpoint(text, DEFAULT_PORT)


def test_a_kernel_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_call(_: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", no_such_call)
    with pytest.raises(UnsupportedPlatform, match=r"the launcher needs Linux 5\.3 or newer"):
        RankProcesses()


def test_the_launcher_names_a_misspelt_variable(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NC10D_TOKENS", "x")
    monkeypatch.setenv("NC10D_INSECURE", "1")  # else this process would get a token
    assert main(["--no-python", "true"]) == 0
    assert capfd.readouterr().err == (
        "nc10d-run: NC10D_TOKENS is not a variable of nc10d; NC10D_TOKEN is\n"
    )
