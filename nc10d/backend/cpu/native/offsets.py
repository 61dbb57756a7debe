"""Where things lie: shared memory that peers read, and the engine's private blocks.

All numbers are byte offsets. Shared offsets are a contract between processes running the same
version; private ones between Python and compiled code.
"""

from __future__ import annotations

# -- one rank's part of a group, in its arena; peers map it ------------------------------------
# One cache line: counter, mask of those who sleep on it, and twice (fingerprint, inline payload).
LINE_COUNTER = 0
LINE_SLEEPERS = 8
LINE_SLOTS = 16
SLOT_BYTES = 24
SLOT_PAYLOAD = 8
FLAG_BIT = 62  # of a fingerprint: its rank wants the other way (`divert`)
AREA_ABORT = 64  # 0, or 1 + the rank whose cause record counts
AREA_STATE = 72  # 0 forming, 1 open, 2 closed
AREA_LEFT = 80  # mask of the host ranks that will never touch this area and its links again
AREA_ACCESS = 88  # what the kernel lets the rank do with all members' private memory: see READS
# What a mate may write of my private memory: an iovec (of which the mate says where, and I how
# many bytes at a time, 0: nothing any more), and the thread that is writing.
AREA_LOAN = 96
AREA_LOAN_BYTES = 104
AREA_WRITER = 112
AREA_RECORDS = 128
RECORD_RING = 16
TEXT_BYTES, SITE_BYTES = 112, 64
RECORD_TEXT = 16
RECORD_SITE = RECORD_TEXT + TEXT_BYTES
RECORD_BYTES = RECORD_SITE + SITE_BYTES  # sequence number, start time in ns, text, call site
AREA_CAUSE = AREA_RECORDS + RECORD_RING * RECORD_BYTES
CAUSE_BYTES = 1920
AREA_LINKS = AREA_CAUSE + CAUSE_BYTES  # one int64 a peer: where my link to it lies

OPEN, CLOSED = 1, 2
READS, WRITES = 1, 2  # access to private memory by the kernel; 0: none

# -- the first pages of an arena: the doorbell, then the rank's noticeboard ----------------------
BOARD_VERSION = 64
BOARD_NOTICE, BOARD_NOTICE_BYTES = 4096, 12288
FIRST_PAGES = BOARD_NOTICE + BOARD_NOTICE_BYTES

# -- a link (one direction between two ranks), in the sender's arena ----------------------------
# Line 0 is the sender's counter with the message header, line 1 the receiver's counter.
LINK_SENT = 0
LINK_TAG = 16  # twice (tag, nbytes, dtype), by parity
LINK_HEADER_BYTES = 24
LINK_TAKEN = 64
LINK_SITES = 128  # twice the sender's call site, which nobody reads while all goes well
LINK_BOARD = 256
# Between hosts a message has one header, sent from and taken to where a board would be.
AWAY_HEADER_BYTES = LINK_HEADER_BYTES + SITE_BYTES
AWAY_BYTES = LINK_BOARD + AWAY_HEADER_BYTES
# What a round of a link spends; the last tick tells that all of it is there.
LINK_TICKS = 8

# -- a channel: one FIFO of programs (a group's collectives, or one end of a link) ---------------
(
    C_LOCK,  # 0, or the thread (its pthread_self) that advances the channel
    C_KIND,
    C_SIZE,
    C_RANK,
    C_SEQ,  # ticks spent
    C_ROUND,
    C_OPS,  # operations begun
    C_MET,  # ticks that everyone is known to have reached
    C_FREE,  # two words: the ticks that free each half
    C_FREE_ODD,
    C_AGREED,
    C_PC,
    C_SEGMENT,
    C_PEER,  # where a wait for all goes on
    C_BLOCKED_AT,  # address and value of the counter waited for, and whose it is
    C_BLOCKED_FOR,
    C_BLOCKED_ON,
    C_USERS,  # address of the table of users' addresses
    C_DESCRIPTOR,  # the running descriptor, 0 for a program run in the caller
    C_HEAD,
    C_TAIL,
    C_AREA,  # my own shared part
    C_FLAGS,  # table of the addresses of all counters
    C_SELF,  # address of my own counter
    C_PARITY,  # bytes from the even table to the odd one, when the round is odd
    C_PARITY_STEP,
    C_BELL_BIT,
    C_PROCESS,
    C_ADVANCE,  # address of the compiled interpreter
    C_BROKEN,  # BROKEN for one that was stopped, FAILING for one whose program went wrong
    C_SPIN,
    C_YIELD,
    C_UNMATCHED,  # a link's message that nobody asked for yet: 1, its tag, its bytes, its dtype
    C_MESSAGE_TAG,
    C_MESSAGE_BYTES,
    C_MESSAGE_DTYPE,
    C_TRACE_ID,
    C_SUBMITTING,  # 1 while a thread changes the ring
    C_SPIN_NOW,  # what is left of the spin after it has been in vain
    C_STREAMS,  # address of the block of its streams, 0 for none
    C_AWAITED,  # bytes that a rank awaits from one that announces C_MESSAGE_BYTES
    C_REACH,  # address of the block that says how to read peers' memory
    C_ARRAY_TYPE,  # address of the type numpy.ndarray
    C_MESSAGE,  # the descriptor that says what message a link carries
    C_RARE,  # address of the word that holds the address of rare_steps.py's function
    C_SITES,  # address of the table of call sites, 0 for none
    C_SITE,  # address of the text of the running call's site, 0 if it is not known
    C_LABEL,  # whose entries these are in the log
    C_LOGGED,  # the log's entry of the running call and its stamp, 0 for none
    C_STAMP,
    C_BEGUN,  # when the running message began; 0: it is little (messages.py), and has not waited
    C_LENT,  # where in my arena (-1: of my private memory) peers write results just now, and how
    C_LENT_BYTES,  # many bytes from there on
    C_RECEIVING,  # 1 while a thread receives a link's message by itself, past the ring
    C_GUARD,  # how many hold the inbox, and how many messages it keeps: nobody may do that then
    C_RING,  # address of the ring: descriptors of what was submitted, C_HEAD's to C_TAIL's
) = range(0, 56 * 8, 8)
C_OWN_USERS = 56 * 8  # four addresses of a program run in the caller
RING_SLOTS = 512  # at first
C_TABLES = C_OWN_USERS + 4 * 8
# Rows of as many words as the group has ranks: boards, inline slots (of even rounds); the same (of
# odd ones); boards of even rounds again, so that the other half's are two rows on in either round;
# counters; and words that stay 0, so that what lies nowhere in shared memory has a base too.
TABLE_INLINE, TABLE_OTHER, TABLE_AGAIN, TABLE_COUNTERS, TABLE_ZEROS = 1, 2, 4, 5, 6
TABLE_ROWS = TABLE_ZEROS + TABLE_OTHER

COLLECTIVE, SENDER, RECEIVER = 0, 1, 2
BROKEN, FAILING = 1, 2


def channel_bytes(size: int) -> int:
    """Return the size of a channel's block for a group of `size`."""
    return C_TABLES + (TABLE_ROWS * size + 1) * 8  # the last word is the odd rounds' zero


# -- reach: how a channel's ranks read each other's memory ----------------------------------------
R_ACCESS, R_SPAN = range(0, 2 * 8, 8)  # R_ACCESS: the least of the ranks' AREA_ACCESS
R_ARENAS = 2 * 8  # for each rank its arena as mapped here, its process (0: this one), its area
R_ROW = 3 * 8
# Folding in blocks keeps the result in the first cache while every rank's part is added.
FOLD_BLOCK = 8192

# -- a descriptor: one submission that waits in a channel's ring --------------------------------
(
    D_STATUS,
    D_PROGRAM,
    D_USERS,
    D_DEADLINE,  # ns of the monotonic clock, 0 for none
    D_STARTED,
    D_ENDED,
    D_TAG,
    D_BYTES,
    D_DTYPE,
    D_GATE,  # a gate to open at the end, 0 for none
    D_ARRAY_DTYPE,  # what the array of a known message must be: its dtype object, its elements
    D_ARRAY_COUNT,
    D_SITE,
    D_CHANNEL,  # of a known message
) = range(0, 14 * 8, 8)
DESCRIPTOR_WORDS = 16

# -- a known operation: its program, and what its arrays must be for it --------------------------
(
    K_CHANNEL,  # where it runs
    K_PROGRAM,
    K_SHORT,  # 1 if who launches it should advance it at once
    K_DTYPE,  # address of the dtype object of both
    K_X_COUNT,  # elements
    K_Y_COUNT,
    K_X_BYTES,
    K_Y_BYTES,
    K_X_LENGTH,  # of dimension 0, where that matters, else -1
    K_Y_LENGTH,
    K_ONE,  # 1 if it is for one array (x and y are the same), 0 if for two
) = range(0, 11 * 8, 8)

# -- the process: what all channels of one rank share -------------------------------------------
(
    P_BELL,  # address of my own doorbell (a futex word)
    P_BELLS,  # table of everyone's
    P_SLEEPING,  # threads of mine that sleep on my bell
    P_WAITING,  # those of them that wait for what another thread advances
    P_STOP,
    P_COUNT,
    P_CHANNELS,  # table of channels that the worker looks at
    P_EVENT_FD,
    P_TRACE,  # address of the trace buffer, 0 for none
    P_TRACE_SIZE,
    P_TRACE_NEXT,
    P_LATE,  # a descriptor ran past its deadline: its channel
    P_ROUNDS,
    P_LOG,  # address of the log, and how many entries have been taken
    P_LOG_NEXT,
    P_FLOOR,  # what lies in my arena before it is no longer shared
    P_LINK_WAITERS,  # threads that wait for any of several words: links' counters, gates
) = range(0, 17 * 8, 8)
PROCESS_BYTES = 17 * 8

# -- the log: an entry for each of the latest calls and messages; for a message, its header ------
E_STAMP, E_LABEL, E_SEQ, E_BEGUN, E_ENDED, E_SITE = range(0, 6 * 8, 8)
E_TEXT = 64
LOG_BYTES = 192
LOG_SLOTS = 2048

# -- the table of call sites: whether it takes no more, then pairs of an address and what it is --
SITE_FULL, SITE_KEYS = 0, 16
SITE_SLOTS = 4096
SITE_OURS = 1

TRACE_BYTES = 32  # time in ns, channel, event, program counter
TRACE_START, TRACE_BLOCKED, TRACE_DONE = 1, 2, 3

# -- streams: what a channel's programs cross to other hosts by ----------------------------------
(
    S_LINE,  # address of a counter that grows when a socket the channel waits for is ready
    S_EPOLL,
    S_LINKS,  # table of links, by rank
    S_MOVED,  # grows with every transfer that got on
    S_ERROR,  # errno of the link that failed, 0 for an orderly end
    S_COUNT,  # how many links are waited for
    S_WAITING,  # address of a table of them: link, and for what
    S_PATIENCE,  # how often to look again before sleeping
    S_TRIES,  # how often that has been since something moved
    S_LAST,  # S_MOVED then
    S_LEFT,  # bytes that are still to come by a transfer that is waited for, segments included
    S_POLL,  # address of a table for poll(2)
    S_UNTIL,  # when the sleep in hand ends
    S_STEP,  # addresses of compiled functions: carry out a step,
    S_PULL,  # take a message's header,
    S_LINGER,  # look after the time between two looks,
    S_SLEEP,  # sleep until a socket is ready,
    S_ARM,  # have the net thread watch
    S_SPARE,  # address of SPARE_BYTES and a page more, or 0: see nc10d_take
    S_COPY,  # the function that copies from there, 0 for the C library's
) = range(0, 20 * 8, 8)
SPARE_BYTES = 256 * 1024
S_SEEN = 20 * 8  # the header of a rank that called something else
HEADER_BYTES = 192  # sequence number, fingerprint, text, site: what ranks of other hosts compare
STREAMS_BYTES = S_SEEN + HEADER_BYTES

(
    L_FD,
    L_RANK,
    L_SENT,  # bytes of the transfer in hand
    L_TAKEN,
    L_LOCK,  # guards the next three
    L_ARMED,  # what epoll watches for
    L_LINE_IN,  # whose lines to count up when it is ready
    L_LINE_OUT,
) = range(0, 8 * 8, 8)
LINK_BLOCK_BYTES = 64
WANT_IN, WANT_OUT = 1, 4  # EPOLLIN, EPOLLOUT

# -- answers --------------------------------------------------------------------------------
DONE, BLOCKED = 0, 1
IDLE, BUSY, UNMATCHED, NEW_SITE = 2, 3, 4, 5
ABORTED, MISMATCH, SIZES, LATE, LOST = -1, -2, -3, -4, -5
UNREADABLE = -9
# A descriptor's status is a set of bits.
FINISHED, WATCHED = 1, 2
