"""Unexpected messages: those at the head of a link whose tag no posted receive has.

A thread that waits for a later message receives such a message into memory of the inbox
(`receive_unexpected`), which keeps the message until a receive asks for that tag. MPI calls this
the unexpected queue.
"""

from __future__ import annotations

import numpy as np

from nc10d.backend.cpu.engine.channel import Channel, Submission
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.transport.links import Header, Inbox, Links, UnexpectedMessage, sender_site
from nc10d.base.run_to_end import import_to_end

# Where a link's words have the address of the sender's counter: of the two ranks, the sender is 0.
_SENT = at.C_TABLES // 8 + at.TABLE_COUNTERS * 2


def receive_unexpected(links: Links, channel: Channel) -> None:
    """Receive the message at the head of a link, unless a receive has asked for it meanwhile."""
    for inbox in links.inboxes():
        if inbox.channel is channel:
            with inbox.lock, inbox:
                receive_unexpected_from(links, inbox)


def receive_unexpected_from(links: Links, inbox: Inbox) -> None:
    """As `receive_unexpected`; the caller holds the inbox."""
    header = inbox.unmatched()
    if header is not None:
        post_unexpected(links, inbox, header)


def post_unexpected(links: Links, inbox: Inbox, header: Header) -> None:
    """Post a receive for an unexpected message; the thread that advances the link completes it."""
    tag, nbytes, dtype = header
    data, site = np.empty(nbytes, np.uint8), sender_site(inbox.channel)
    linked = links.program(False, nbytes, away=is_remote(inbox.channel))
    submission = Submission(linked, [plain.address(data)], data, 0, header)
    inbox.channel.submit(submission)
    inbox.unexpected.append(UnexpectedMessage(tag, dtype, data, submission, site))


def is_remote(channel: Channel) -> bool:
    """Return whether a link leads to another host."""
    return channel.spec.streams != 0


def arrived(channel: Channel) -> bool:
    """Return whether a link's next message has arrived, or has begun to."""
    if is_remote(channel):
        # Imported late: the module compiles functions that a job on a single host does without.
        import_to_end("nc10d.backend.cpu.native.sockets").peek(channel.address)
    sent = int(channel.words[_SENT])
    return bool(entry_points.load_word(sent) >= channel.get(at.C_TICKS) + 1)


def head(channel: Channel) -> Header:
    """Return the header of the message that has arrived at a link's head."""
    first = channel.get(at.C_CELL) + at.CELL_HEADER
    tag, nbytes, dtype = (int(entry_points.load_word(first + 8 * i)) for i in range(3))
    return tag, nbytes, dtype


def next_message(channel: Channel) -> tuple[int, int]:
    """Return the address of the word that announces a link's next message, and its value then."""
    if is_remote(channel) and not arrived(channel):
        return channel.get(at.C_BLOCKED_AT), channel.get(at.C_BLOCKED_FOR)
    return int(channel.words[_SENT]), channel.get(at.C_TICKS) + 1
