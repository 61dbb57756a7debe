"""How long a rank on another host may be silent before it is lost.

A rank is lost when its control connection ends, or when no segment has come on that connection for
NC10D_PEER_TIMEOUT seconds T. The control thread looks at the kernel's segment count every T / LOOKS
seconds. LOOKS looks in a row without a new segment are a silence. So time in which this process
does not run, or this machine is paused, is no silence from others. A closed or reset connection
ends at once.

Any segment counts. Each end's kernel sends one at least every second: a keepalive probe, and an
answer to each probe from the other end. A stopped process's kernel does so, too. An end whose data
is not acknowledged sends no probes, but the data again, after 0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.6, 2.4,
4 and 7.2 s (TCP_THIN_LINEAR_TIMEOUTS), which is as often.

At a loss of 10 % both ways, a silence of 10 s takes the loss of at least nine segments that the
other end sent unasked, and no answer to nine from this end: 0.1 ** 9 * 0.19 ** 9 = 3e-16. Such a
silence may begin in each of the 3.6e6 seconds of 1,000 hours: one false death in 1,000 hours has a
probability of 1e-9 for each end of a connection, 1e-4 in a job with 50,000 connections. Duplicates
and delays below a second change nothing. Where both ends always have many messages under way, TCP
doubles the time from each try to the next, so six tries are left: 0.1 ** 6 * 0.19 ** 6, 2e-4 in
1,000 hours. A pause of 5 s leaves four probes each way: 1e-7 for each pause. T = 5 leaves as many:
half a false death in 1,000 hours.

The kernel's own limits count only answers to what this end has sent, nine tries at 0.19: one false
death in 1,000 hours at each end, and many where messages are under way. So the kernel's limit is
ten times as long. That limit is the only one where a kernel counts no segments.
"""

from __future__ import annotations

import socket
import struct

from nc10d.base.variables import seconds_of

VARIABLE = "NC10D_PEER_TIMEOUT"
DEFAULT_SECONDS, LEAST_SECONDS, _MOST_SECONDS = 10.0, 3.0, 1e9
LOOKS = 20

_THIN_LINEAR_TIMEOUTS = 16  # TCP_THIN_LINEAR_TIMEOUTS in <linux/tcp.h>
_SEGMENTS_AT = 140  # tcpi_segs_in in struct tcp_info of <linux/tcp.h>, since Linux 4.2
_SEGMENTS = struct.Struct("=I")
_KERNELS_TIMES, _MOST_MS = 10, (1 << 31) - 1


def peer_seconds() -> float:
    """Return for how long a rank on another host may be silent; ValueError if malformed."""
    return seconds_of(VARIABLE, DEFAULT_SECONDS, LEAST_SECONDS, _MOST_SECONDS)


class SilenceWatch:
    """A connection's silence, in looks; `seconds` is the longest silence."""

    def __init__(self, wire: socket.socket, seconds: float) -> None:
        self._wire, self._segments, self._silent = wire, 0, 0
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, 1),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_USER_TIMEOUT, min(_MOST_MS, round(1000 * _KERNELS_TIMES * seconds))),
            (_THIN_LINEAR_TIMEOUTS, 1),
        ):
            wire.setsockopt(socket.IPPROTO_TCP, option, value)

    def look(self) -> bool:
        """Return whether nothing has come for LOOKS looks in a row; to be called in equal steps."""
        info = self._wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        known = len(info) >= _SEGMENTS_AT + _SEGMENTS.size
        segments = _SEGMENTS.unpack_from(info, _SEGMENTS_AT)[0] if known else 0
        silent = segments == self._segments and segments > 0
        self._segments, self._silent = segments, self._silent + 1 if silent else 0
        return self._silent >= LOOKS
