"""What a rank writes when Ctrl-C finds it at its imports: a traceback that tells nobody anything.

Pure: bytes in, bytes out. From the first traceback on that comes out of an import statement, out
of the import machinery or out of Python's own start, the rest is left out: it is the interpreter
ending (NumPy, for one, follows with a page of advice). What a finaliser raised is left out too:
its object is one that Ctrl-C left half made (llvmlite's strings, where it found a compilation).
Any other traceback stays: where a job hung is what its user presses Ctrl-C to see.
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
_OF_A_FINALISER = re.compile(
    rb"^Exception ignored (?:in|while).*\n"
    rb"(?:Traceback \(most recent call last\):\n(?: .*\n)*.*\n?)?",
    re.MULTILINE,
)


def hushed(text: bytes) -> bytes:
    """Return `text` up to the first traceback that comes out of an import, without finalisers'."""
    starts = [found.start() for found in _TRACEBACK.finditer(text)]
    for start, end in itertools.pairwise([*starts, len(text)]):
        if _IMPORTING.search(text, start, end):
            text = text[:start]
            break
    return _OF_A_FINALISER.sub(b"", text)
