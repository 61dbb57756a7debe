"""The command line: arguments in, a request out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nc10d.run.cli import DEFAULT_PORT, parse_endpoint, read


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
    assert (output.log_dir, output.file_only, output.prefixed) == (
        Path("logs"),
        (False, True),
        False,
    )


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--nproc-per-node 0 a.py",
        "--nnodes 2 a.py",
        "--nnodes 2 --node-rank 0 a.py",
        "--nnodes 2 --node-rank 2 --rdzv-endpoint h a.py",
        "--nnodes 2 --node-rank 0 --standalone a.py",
        "--nnodes 1:4 a.py",
        "--redirects 3 a.py",
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
