"""The protocol of an object call in compiled code: a prepared call between two hooks.

A hook is a C function of nc10d, no code of the user's. A call uses a block of words: first the
words below, then the hooks' own. No other call uses the block meanwhile.

    file                                   part
    backend/cpu/native/hooked_calls.py     the entry points: hook `before`, operation, hook `after`
    codec/compiled_openings.py             the hooks, and their own words
    codec/openings.py                      the memory of a call, and its way back into Python
    group/dispatch.py (run_hooked)         the caller

    state     GIL    does                                        ends with
    writing   held   `before` writes the objects of this rank    0, REFUSED, RAISED
    running   free   the operation; of messages several, with    DONE, or the engine's answer to the
                     `count` after each, which returns how many  first that has not ended
    reading   held   `after` reads the objects that have come    0, UNFINISHED, RAISED

    answer of the entry point    what follows (H_RAN operations have ended)
    ALL_DONE + H_RAN             the lists are filled
    REFUSED, UNFINISHED          the caller does in Python what is left: all, or the reading
    RAISED                       the entry point raises the exception that is set
    other                        PreparingBackend.finish ends the operation, the caller goes on

Invariant: `after` fills the lists in one last step, so every other end leaves them unchanged. The
way in Python runs the same operations in the same order. So ranks may take different ways, and a
rank may change over between two operations. The engine itself never answers REFUSED,
UNFINISHED, RAISED or ALL_DONE + H_RAN.
"""

(
    H_BEFORE,  # addresses of the hooks
    H_COUNT,
    H_AFTER,
    H_TASK,  # what the hooks have to do: a task of compiled_openings.py
    H_VALUE,  # address of the object to send
    H_PLACES,  # address of the list to fill
    H_RAN,  # how many operations have ended; 0 between calls
    H_TAG,  # the tag of the messages behind the first, which `count` stores
) = range(0, 8 * 8, 8)
H_WORDS = 8
REFUSED, UNFINISHED, RAISED = 64, 65, 66
ALL_DONE = 128
