"""Memory layouts: shared memory that peers read, and the engine's private blocks.

Unless a comment gives another unit, all numbers are byte offsets. Shared offsets are a contract
between processes of the same version, private offsets between Python and compiled code. Compiled
code reads them as attributes of this module (`at.C_TICKS`), which Numba takes as constants.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]
"""Memory that compiled code reads and writes as words."""
PAGE = 4096
"""Bytes of a page."""

# -- a rank's part of a group, in its arena; peers map it ------------------------------------
# A cache line: counter, mask of ranks that sleep on it, two slots (fingerprint, inline payload).
LINE_COUNTER = 0
LINE_SLEEPERS = 8
LINE_SLOTS = 16
SLOT_BYTES = 24
SLOT_PAYLOAD = 8
FLAG_BIT = 62  # in a fingerprint: the rank asks for the other branch (`branch_if_flagged`)
AREA_ABORT = 64  # 0, or 1 + the rank whose cause record is valid
AREA_STATE = 72  # 0 forming, 1 open, 2 closed
AREA_LEFT = 80  # mask of the host ranks that never touch this area and its links again
AREA_ACCESS = 88  # the rank's access to all members' private memory: 0, READS or WRITES
# Private memory that is exposed for writes: an iovec, whose address the writing peer sets and whose
# length (bytes at a time; 0: withdrawn) the owner sets, and the id of the writing thread.
AREA_WRITABLE = 96
AREA_WRITABLE_BYTES = 104
AREA_WRITER = 112
AREA_MARK = 120  # by which peers know the area as their group's (formation.py)
AREA_RECORDS = 128
RECORD_RING = 16
TEXT_BYTES, SITE_BYTES = 112, 64
RECORD_TEXT = 16
RECORD_SITE = RECORD_TEXT + TEXT_BYTES
RECORD_BYTES = RECORD_SITE + SITE_BYTES  # a record: sequence number, start in ns, text, call site
AREA_CAUSE = AREA_RECORDS + RECORD_RING * RECORD_BYTES
CAUSE_BYTES = 1920
AREA_LINKS = AREA_CAUSE + CAUSE_BYTES  # an int64 per peer: the place of this rank's link to it

OPEN, CLOSED = 1, 2
READS, WRITES = 1, 2  # access to peers' private memory by the kernel; 0: none

# -- the first pages of an arena: doorbell, notice version, PROBE (peer_access.py), wait notice ----
NOTICE_VERSION = 64
NOTICE_START, NOTICE_BYTES = PAGE, 3 * PAGE
FIRST_PAGES = NOTICE_START + NOTICE_BYTES

# -- a link (a direction between two ranks), in the arena of its first user ---------------------
# Line 0 is the sender's counter, line 1 the receiver's, then come the cells. A round has the cell
# with its number: the sender's call site, which is read only for error messages; the header of the
# message that begins in this round (tag, nbytes, dtype); and the message, if small.
LINK_SENT = 0
LINK_TAKEN = 64
LINK_CELLS = 128
LINK_HEADER_BYTES = 24
CELL_SITE = 0
CELL_HEADER = SITE_BYTES
CELL_DATA = CELL_HEADER + LINK_HEADER_BYTES
CELL_DATA_BYTES = 1064  # so that a cell is whole cache lines, and holds 1 KiB
CELL_BYTES = CELL_DATA + CELL_DATA_BYTES
CELLS = 64  # a power of two
LINK_STAGING = LINK_CELLS + CELLS * CELL_BYTES
# Between hosts a link is private to a rank; a header that travels stands behind two cells.
AWAY_CELLS = 2
AWAY_HEADER = LINK_CELLS + AWAY_CELLS * CELL_BYTES
AWAY_HEADER_BYTES = LINK_HEADER_BYTES + SITE_BYTES
AWAY_BYTES = AWAY_HEADER + AWAY_HEADER_BYTES
# Ticks of a link's round; the last tick states that the whole message is there.
LINK_TICKS = 8

# -- a channel: a FIFO of programs (a group's collectives, or an end of a link) ------------------
(
    C_LOCK,  # 0, or the thread (by pthread_self) that advances the channel
    C_KIND,
    C_SIZE,
    C_RANK,
    C_TICKS,  # ticks spent
    C_ROUND,
    C_OPS,  # operations begun
    C_MET,  # ticks that every rank has reached, as far as this rank has looked
    C_FREE,  # two words: the tick at which all peers have left each slot
    C_FREE_ODD,
    C_AGREED,
    C_PC,
    C_SEGMENT,
    C_PEER,  # the first peer that a wait for all has not seen come
    C_BLOCKED_AT,  # the counter that the channel waits for: address, value, rank
    C_BLOCKED_FOR,
    C_BLOCKED_ON,  # ~rank for a rank on another host, this rank for a gate; the peer on failure
    C_USERS,  # address of the table with the addresses of the user arrays
    C_DESCRIPTOR,  # the running descriptor, 0 for a program run in the caller
    C_HEAD,
    C_TAIL,
    C_AREA,  # this rank's shared part
    C_COUNTERS,  # table of all counters' addresses
    C_SELF,  # address of this rank's counter
    C_PARITY,  # added to addresses of table words: 0 in even rounds, C_PARITY_STEP in odd ones
    C_PARITY_STEP,  # bytes from even rounds' rows to odd rounds' rows
    C_BELL_BIT,
    C_RANK_BLOCK,
    C_ADVANCE,  # address of the compiled interpreter
    C_BROKEN,  # 0; BROKEN once stopped; FAILING once a program has failed
    C_SPIN,
    C_YIELD,
    C_LAUNCH_YIELDS,  # how often a launching thread yields for peers; 0 if it spins instead
    C_YIELD_FROM,  # when launches may yield: at most CLOSELY_NS later than this time
    C_UNMATCHED,  # an unexpected message at the head of a link: 1, the tag, bytes, dtype
    C_MESSAGE_TAG,
    C_MESSAGE_BYTES,
    C_MESSAGE_DTYPE,
    C_SUBMITTING,  # 1 while a thread changes the ring
    C_SPIN_NOW,  # the length of the next spin: C_SPIN, less after spins in vain
    C_STREAMS,  # address of the streams' block, 0 for none
    C_AWAITED,  # bytes that C_AWAITED_BY awaits where C_BLOCKED_ON announces C_MESSAGE_BYTES
    C_AWAITED_BY,  # as C_BLOCKED_ON: a local rank, or ~rank
    C_REACH,  # address of the block with the ways to peers' memory (R_...)
    C_ARRAY_TYPE,  # address of the type numpy.ndarray
    C_MESSAGE,  # the descriptor of the message that a link carries
    C_SLOW_STEPS,  # address of the word that holds the address of slow_steps.py's function
    C_SITES,  # address of the table of call sites, 0 for none
    C_SITE,  # address of the running call's site as text, 0 if unknown
    C_LABEL,  # the group's or link's label in the log
    C_LOGGED,  # the running call's log entry and that entry's stamp, 0 for none
    C_STAMP,
    C_BEGUN,  # when the running message began; 0: small (prepared_messages), has not waited
    C_WRITABLE,  # place in this rank's arena (-1: in private memory) that peers may write just now
    C_WRITABLE_BYTES,  # bytes from there on
    C_RECEIVING,  # 1 while a thread receives a link's message by itself, past the ring
    C_GUARD,  # not 0: no C_RECEIVING (the unexpected queue is held or not empty, or Inbox.in_order)
    C_RING,  # address of the ring: the descriptors from C_HEAD to C_TAIL
    C_POSTING,  # threads that post a receive past the inbox's lock; excludes C_GUARD
    C_CELL,  # a link's cell for this round
    C_CELLS,  # a link's first cell, 0 for a group's collectives
    C_CELL_MASK,  # the number of cells - 1
    C_RECEIVED,  # cells (bits) behind this round's whose messages have been received already
) = range(0, 63 * 8, 8)
RING_SLOTS = 512  # at first
C_TABLES = 63 * 8
# Rows of a word per rank: staging buffers and inline slots (on a link, the data of the sender's
# cell) of even rounds; the same of odd rounds;
# staging buffers of even rounds again, so that the other slot is two rows on in any round;
# counters; and words that stay 0, the base of operands outside shared memory.
TABLE_INLINE, TABLE_OTHER, TABLE_AGAIN, TABLE_COUNTERS, TABLE_ZEROS = 1, 2, 4, 5, 6
TABLE_ROWS = TABLE_ZEROS + TABLE_OTHER
LINK_ROW = C_TABLES + TABLE_INLINE * 2 * 8  # on a link, the sender's word among the inline slots

COLLECTIVE, SENDER, RECEIVER = 0, 1, 2
BROKEN, FAILING = 1, 2


def channel_bytes(size: int) -> int:
    """Return the bytes of a channel's block, for `size` ranks."""
    return C_TABLES + (TABLE_ROWS * size + 1) * 8  # the last word is the odd rounds' zero


# -- reach: the ways by which a channel's ranks read and write each other's memory ----------------
R_ACCESS, R_ARENA_BYTES = range(0, 2 * 8, 8)  # R_ACCESS: the least AREA_ACCESS among the ranks
R_ARENAS = 2 * 8  # per rank: the arena as mapped here, the process (0: this process), the area
R_ROW = 3 * 8
# Bytes: folding in such blocks keeps the result in the L1 cache while parts are added.
FOLD_BLOCK = 8192

# -- a descriptor: a submission that waits in a channel's ring ----------------------------------
(
    D_STATUS,
    D_PROGRAM,
    D_USERS,
    D_DEADLINE,  # ns on the monotonic clock, 0 for none
    D_TAG,
    D_BYTES,
    D_DTYPE,
    D_GATE,  # a gate to open at the end, 0 for none
    D_ARRAY_DTYPE,  # the array that a prepared message needs: dtype object, element count
    D_ARRAY_COUNT,
    D_SITE,
    D_CHANNEL,  # of a prepared message
    D_LOOKS,  # how often a submitting thread advances the channel (-1: the worker does)
    D_LOOKS_WAITING,  # and a thread that waits next
) = range(0, 14 * 8, 8)
DESCRIPTOR_WORDS = 14

# -- a prepared call: its program, the form of its arguments x and y, and its table ---------------
(
    K_CHANNEL,  # that runs the call
    K_PROGRAM,
    K_SHORT,  # 1 if the launching thread should advance the call at once
    K_DTYPE,  # address of the dtype object for all arrays
    K_X,  # the form of x: ONE array, the length of an array tuple, or ABSENT (None)
    K_Y,  # the form of y, or SAME as x
    K_OWN,  # how many arrays belong to the program itself; they come first
    K_COUNT,  # how many arrays x and y have together
    K_WRITTEN,  # numbers of the first array that is written, and of the first after those
    K_WRITTEN_END,
    K_NONE,  # addresses of None and the type tuple
    K_TUPLE,
    K_ARRAYS,  # address of the array table
    K_ROWS,  # and of the rows, one for each array in x and y
    K_WHOLE,  # number of the array in which array 0 may lie (the form in place), 0: none
    K_PLACE,  # the byte there at which array 0 then begins
) = range(0, 16 * 8, 8)
K_BYTES = 16 * 8
SAME, ABSENT, ONE = -2, -1, 0
# A row: elements, bytes, and the length of dimension 0 if that matters, else -1.
ROW_COUNT, ROW_BYTES, ROW_LENGTH = 0, 8, 16
PREPARED_ROW = 24

# -- the rank block: shared by all channels of a rank --------------------------------------------
(
    P_BELL,  # address of this rank's doorbell (a futex word)
    P_BELLS,  # table of all ranks' doorbells
    P_SLEEPING,  # this rank's threads that sleep on the bell
    P_WAITING,  # the sleeping threads that wait for a channel which another thread advances
    P_STOP,
    P_COUNT,
    P_CHANNELS,  # table of channels that the worker advances
    P_EVENT_FD,
    P_FAILED,  # the channel whose failure (deadline, mismatch, ...) has ended the worker's loop
    P_PASSES,
    P_LOG,  # address of the log, and how many entries have been taken
    P_LOG_NEXT,
    P_FLOOR,  # offset in this rank's arena where the shared part begins
    P_LINK_WAITERS,  # threads that wait for any of several words: links' counters, gates
) = range(0, 14 * 8, 8)
RANK_BLOCK_BYTES = 14 * 8

# -- the log: an entry per recent call (its text) or message (its header) ------------------------
E_STAMP, E_LABEL, E_SEQ, E_BEGUN, E_ENDED, E_SITE = range(0, 6 * 8, 8)
E_TEXT = 64
LOG_BYTES = 192
LOG_SLOTS = 2048

# -- the table of call sites: a word that is 1 if it is full, then pairs of key and text address --
SITE_FULL, SITE_KEYS = 0, 16
SITE_SLOTS = 16384
SITE_OURS = 1

# -- streams: a channel's sockets to other hosts --------------------------------------------------
(
    S_READY,  # address of a counter that grows when a socket the channel waits for is ready
    S_EPOLL,
    S_WIRES,  # table of wires, by rank
    S_MOVED,  # grows with every transfer that got on
    S_ERROR,  # the failed wire's errno, 0 for an orderly end
    S_COUNT,  # how many wires are waited for
    S_WAITING,  # address of a table: wire, WANT_IN or WANT_OUT
    S_PATIENCE,  # how often to look again before sleeping
    S_TRIES,  # looks since bytes moved last; -1 once the thread has gone to sleep
    S_LAST,  # S_MOVED at that time
    S_LEFT,  # bytes still to come in the awaited transfer, later segments included
    S_POLL,  # address of a table for poll(2)
    S_UNTIL,  # when the current sleep ends, in ns
    S_STEP,  # addresses of compiled functions: carry out a step,
    S_PULL,  # take a message's header,
    S_LINGER,  # look after the time between two looks,
    S_SLEEP,  # sleep until a socket is ready,
    S_ARM,  # have the poller thread watch
) = range(0, 18 * 8, 8)
S_SEEN = 18 * 8  # the header from a rank that made another call
HEADER_BYTES = 192  # sequence number, fingerprint, text, site; compared between hosts
STREAMS_BYTES = S_SEEN + HEADER_BYTES

(
    W_FD,
    W_RANK,
    W_SENT,  # the current transfer's bytes that have gone
    W_TAKEN,
    W_LOCK,  # guards the next three
    W_ARMED,  # what epoll watches for
    W_READY_IN,  # address of the ready counter to raise, 0: none
    W_READY_OUT,
) = range(0, 8 * 8, 8)
WIRE_BYTES = 64
WANT_IN, WANT_OUT = 1, 4  # EPOLLIN, EPOLLOUT

# -- answers --------------------------------------------------------------------------------
DONE, BLOCKED = 0, 1
IDLE, BUSY, UNMATCHED, NEW_SITE = 2, 3, 4, 5
ABORTED, MISMATCH, SIZES, LATE, LOST = -1, -2, -3, -4, -5
UNREADABLE = -9
# A descriptor's status is a set of bits.
FINISHED, WATCHED = 1, 2
