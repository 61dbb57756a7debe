"""Encode Python objects as bytes that are safe to decode: the default codec of the object calls.

    message = encode({"step": 3, "weights": array})     # arrays are referred to, not copied
    flat = message.flat()                               # what travels: one array of bytes
    value = message.envelope().open(flat)               # arrays are views of `flat`

Supported are None, bool, int of any size, float, complex, str (lone surrogates too), bytes,
bytearray, list, tuple, dict, set, frozenset, NumPy arrays, scalars and dtypes with the types in
nc10d.arrays.dtypes, the types in standard_types.py (OrderedDict, Namespace, paths, named tuples,
Enum members), and types registered with `register_type` or `register_dataclass`. Types are exact:
any other subclass is refused rather than converted. An object that occurs twice is a single object
again on the receiver, except containers in keys. An object that contains itself is refused, unless
all its parts have Python's own types: such an object is pickled, and the pickle is checked.

Decoding calls no functions that the stream names, except those registered on the receiver. Every
malformed stream raises CodecError. Memory stays in proportion to the stream, depth below MAX_DEPTH.
"""

from nc10d.codec.decoder import decode
from nc10d.codec.encoder import encode
from nc10d.codec.messages import EncodedMessage, Envelope, MessageKind, encode_pickled
from nc10d.codec.tags import MAX_DEPTH
from nc10d.codec.type_registry import register_dataclass, register_type

__all__ = [
    "MAX_DEPTH",
    "EncodedMessage",
    "Envelope",
    "MessageKind",
    "decode",
    "encode",
    "encode_pickled",
    "register_dataclass",
    "register_type",
]
