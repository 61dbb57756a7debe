"""The thread that advances this process's groups on MPI."""

from __future__ import annotations

from nc10d.backend.polled.progress_thread import progress_thread

# It ends at exit before mpi4py finalises MPI: no thread may call MPI then.
engine = progress_thread("nc10d-mpi")
