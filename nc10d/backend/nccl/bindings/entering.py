"""Entering a launch: compiled code numbers and logs the call, and compares it with peers' calls.

A rank first puts the call onto its board (backend.shared_board), then looks at its local peers'
boards. So if two ranks make different calls under a number, the later rank sees the difference,
before it enters the communicator. Ranks that are CALLS or more launches apart are not compared
meanwhile. A board's slot has the call's number and chain, a hash over this call and all calls
before.
"""

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import (
    exchange,
    load,
    load_acquire,
    move,
    nc10d_now,
    store,
    store_release,
)
from nc10d.backend.cpu.native.sites import nc10d_site
from nc10d.kernels.cache import compiled_callback

CALLS, RECORDS = 512, 64
"""How many of a rank's latest calls peers compare, and how many they find as text."""
BOARD_NUMBER, BOARD_CALLS = 0, 64  # the latest call's number; the calls
BOARD_RECORDS = BOARD_CALLS + 16 * CALLS
BOARD_BYTES = BOARD_RECORDS + at.RECORD_BYTES * RECORDS
LINKED = 16
"""How many of a link's latest messages are compared."""
LINK_BYTES = 8 + 32 * LINKED
"""A link's part of a board, behind the calls: whether a graph has messages there, then messages
by number, tag, bytes, and a hash over this and all before."""
TAGS_DIFFER, NEW_SITE, DIFFERS = 98, 99, 100
"""Answers: 0, TAGS_DIFFER, NEW_SITE (nothing has happened), or DIFFERS + a peer's index. None is a
code from NCCL, and all are less than native.SCALE."""

# A caller: a rank's launches of collectives, or of messages. The word for the table of sites lies
# where `nc10d_site` expects that word in a channel.
CALLER_SITES = at.C_SITES
(
    CALLER_NOTE,  # address of the latest call's record
    CALLER_BOARD,  # address of this rank's board, 0 without peers to compare with
    CALLER_LOG,  # address of the log
    CALLER_NEXT,  # address of the number of the log's entries so far
    CALLER_LABEL,  # the entries' label
    CALLER_NUMBER,  # launches so far
    CALLER_CHAIN,
    CALLER_STAMP,  # the latest entry's stamp
    CALLER_PEERS,
    CALLER_PEER,  # for each peer: address of the word with the board's place, the arena's base
) = range(CALLER_SITES + 8, CALLER_SITES + 11 * 8, 8)

# A link between two ranks: its part of this rank's board; the address of the word with the place of
# the peer's board, the arena's base, and the link's offset there; messages so far, and their hash.
LINK_OWN, LINK_WORD, LINK_BASE, LINK_OFFSET, LINK_NUMBER, LINK_CHAIN = range(0, 6 * 8, 8)

_MIXING = -7046029254386353131
"""The golden ratio's 64 bits: an odd factor that mixes well (Knuth, TAOCP 3, section 6.4)."""

# A call: its fingerprint, then its text.
CALL_TEXT = 8


@compiled_callback("int64(int64, int64)")
def nc10d_nccl_enter(caller, call):  # type: ignore[no-untyped-def]
    """Number, record and log a call, and compare it with peers' calls; see NEW_SITE."""
    site = nc10d_site(caller)
    if site == at.NEW_SITE:
        return NEW_SITE
    number, now = load(caller + CALLER_NUMBER) + 1, nc10d_now()
    store(caller + CALLER_NUMBER, number)

    note = load(caller + CALLER_NOTE)
    store(note, number)
    store(note + 8, now)
    move(note + at.RECORD_TEXT, call + CALL_TEXT, at.TEXT_BYTES)

    place = load(load(caller + CALLER_NEXT))
    store(load(caller + CALLER_NEXT), place + 1)
    entry = load(caller + CALLER_LOG) + at.LOG_BYTES * (place & (at.LOG_SLOTS - 1))
    store_release(entry + at.E_STAMP, 0)  # a reader that catches a half-written entry discards it
    store(entry + at.E_LABEL, load(caller + CALLER_LABEL))
    store(entry + at.E_SEQ, number)
    store(entry + at.E_BEGUN, now)
    store(entry + at.E_ENDED, 0)
    store(entry + at.E_SITE, site)
    move(entry + at.E_TEXT, call + CALL_TEXT, at.TEXT_BYTES)
    store_release(entry + at.E_STAMP, place + 1)
    store(caller + CALLER_STAMP, place + 1)

    board = load(caller + CALLER_BOARD)
    if board == 0:
        return 0
    chain = load(caller + CALLER_CHAIN) * _MIXING + load(call)
    store(caller + CALLER_CHAIN, chain)
    record = board + BOARD_RECORDS + at.RECORD_BYTES * (number & (RECORDS - 1))
    store_release(record, 0)
    store_release(record + 8, now)
    move(record + at.RECORD_TEXT, call + CALL_TEXT, at.TEXT_BYTES)
    if site != 0:
        move(record + at.RECORD_SITE, site, at.SITE_BYTES)
    else:
        store(record + at.RECORD_SITE, 0)
    store_release(record, number)
    store_release(board + BOARD_NUMBER, number)
    slot = BOARD_CALLS + 16 * (number & (CALLS - 1))
    store_release(board + slot, 0)
    store_release(board + slot + 8, chain)
    exchange(board + slot, number)  # a full fence: mine is there before I look at theirs
    for peer in range(load(caller + CALLER_PEERS)):
        row = caller + CALLER_PEER + 16 * peer
        offset = load_acquire(load(row))
        if offset != 0:
            theirs = load(row + 8) + offset - 1 + slot
            same = load_acquire(theirs) == number
            other = load_acquire(theirs + 8) != chain
            if same and other and load_acquire(theirs) == number:
                return DIFFERS + peer
    return 0


@compiled_callback("int64(int64, int64, int64)")
def nc10d_nccl_link(link, tag, content):  # type: ignore[no-untyped-def]
    """Number a message on its link, and compare it with the peer's; see TAGS_DIFFER."""
    number = load(link + LINK_NUMBER) + 1
    store(link + LINK_NUMBER, number)
    own, place = load(link + LINK_OWN), load_acquire(load(link + LINK_WORD))
    chain = (load(link + LINK_CHAIN) * _MIXING + tag) * _MIXING + content
    store(link + LINK_CHAIN, chain)
    at_slot = 8 + 32 * (number & (LINKED - 1))
    store_release(own + at_slot, 0)
    store_release(own + at_slot + 8, tag)
    store_release(own + at_slot + 16, content)
    store_release(own + at_slot + 24, chain)
    exchange(own + at_slot, number)  # a full fence, as above
    if place == 0:
        return 0
    theirs = load(link + LINK_BASE) + place - 1 + load(link + LINK_OFFSET)
    if load_acquire(own) != 0 or load_acquire(theirs) != 0:
        return 0
    slot = theirs + at_slot
    same = load_acquire(slot) == number
    other = load_acquire(slot + 24) != chain
    if same and other and load_acquire(slot) == number:
        return TAGS_DIFFER
    return 0
