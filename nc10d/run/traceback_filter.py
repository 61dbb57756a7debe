"""Drop the tracebacks that Ctrl-C causes during a rank's imports. Pure: bytes in, bytes out.

Such a traceback shows where Python was importing, and nothing about the user's program.

| text | action |
|---|---|
| a traceback out of an import statement, the import machinery or Python's start | cut from here |
| whatever follows it: the interpreter ending, NumPy's page of advice | cut as well |
| an "Exception ignored" of a finaliser, whose object Ctrl-C left half made | remove |
| any other traceback: it shows where a job hung | keep |
"""

from __future__ import annotations

import itertools
import re

_TRACEBACK = re.compile(  # the first of its chain
    rb"(?<!exception occurred:\n\n)(?<!following exception:\n\n)"
    rb"^(?:Exception ignored .*\n)?Traceback \(most recent call last\):"
    rb"|^Fatal Python error: init_",
    re.MULTILINE,
)
_IMPORTING = re.compile(
    rb"^Fatal Python error: init_"
    rb"|^    (?:import|from) "  # the source line of a frame
    rb'|^  File "<frozen (?:importlib|site|zipimport|encodings|codecs)'
    rb"|^  File .*, in import_module$",
    re.MULTILINE,
)
_FINALISER = re.compile(
    rb"^Exception ignored (?:in|while).*\n"
    rb"(?:Traceback \(most recent call last\):\n(?: .*\n)*.*\n?)?",
    re.MULTILINE,
)


def without_import_tracebacks(text: bytes) -> bytes:
    """Return `text` up to the first traceback out of an import, without those of finalisers."""
    starts = [found.start() for found in _TRACEBACK.finditer(text)]
    for start, end in itertools.pairwise([*starts, len(text)]):
        if _IMPORTING.search(text, start, end):
            text = text[:start]
            break
    return _FINALISER.sub(b"", text)
