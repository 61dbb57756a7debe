"""The launcher's main function: options, the job's store and token, the agent, the exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import MutableMapping, Sequence

from nc10d.auth.token import VALUE, insecure, job_token, new_token, require_token
from nc10d.base import variables
from nc10d.errors import AuthError, StoreError, UnsupportedPlatform
from nc10d.run.launch_options import LaunchRequest, read
from nc10d.run.nodes import joined
from nc10d.run.output import OutputError

NOT_RUNNABLE = 127
BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher with `argv` (default: the process's arguments); return its exit code.

    Blocks until every rank has ended. Wrong options end the process with code 2.
    """
    from nc10d.run import agent

    open_standard_descriptors()
    request = read(sys.argv[1:] if argv is None else argv)
    for note in (*variables.problems(os.environ), *request.notes):
        agent.write_message(f"nc10d-run: {note}\n")
    try:
        made = ensure_token(request, os.environ)
        with joined(request, agent.write_message, made) as job:
            return agent.run(job, request)
    except BrokenPipeError:
        # Our output's reader has left. Python would complain again when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return BROKEN_PIPE
    except OutputError as error:
        agent.write_message(f"nc10d-run: {error}\n")
        return 1
    except OSError as error:
        advice = "; raise the limit, ulimit -n" if error.errno == errno.EMFILE else ""
        agent.write_message(f"nc10d-run: cannot start the ranks: {error}{advice}\n")
        return NOT_RUNNABLE
    except (AuthError, StoreError, UnsupportedPlatform) as error:
        agent.write_message(f"nc10d-run: {error}\n")
        return 1


def open_standard_descriptors() -> None:
    """Open /dev/null in place of closed standard descriptors.

    A pipe or socket with such a number would be taken for the ranks' input or output.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  (for the process's life)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def ensure_token(request: LaunchRequest, environment: MutableMapping[str, str]) -> bool:
    """Put a new token into `environment` for a job of one node that has none; return whether.

    The user's own token stays, and a network that the user trusts needs none. AuthError if the job
    needs a token that only the user can provide.
    """
    one_node = request.job.nnodes == 1
    made = one_node and job_token(environment) is None and not insecure(environment)
    if made:
        environment[VALUE] = new_token()  # for the store here, and inherited by the ranks
    require_token(request.job.master_addr, "the store of a job of several nodes", environment)
    return made
