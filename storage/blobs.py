"""Bytes as the store keeps them: encodings, digests, compression.

Idea: everything long is a blob, named by the digest of its uncompressed content, so equal content is kept once and a flipped bit
cannot pass. Encodings are functions of the values alone.

Encodings (the first byte says which)
    2, 4       token ids: little-endian unsigned integers of that many bytes; 2 where every id fits
    b          behaviour log-probabilities: little-endian float32
    s          the source bytes of an observation, as they are
    c          canonical JSON of a tool call

Ids are compressed with LZMA, whose context models know about even and odd bytes: 7 % smaller than zstd at its highest level on
2,000 ids of English text, and still decoded at 8 million ids a second. All else is compressed with zstd.

A digest is BLAKE2b with 128 bits: equal by chance once in 10**20 among a billion blobs. It guards against faults, not
against a person who spends 2**64 hashes on making two observations collide.
"""

from __future__ import annotations

import hashlib
import lzma
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from longstraw_agents.errors import CorruptionError, TokenError
from longstraw_agents.storage.schema import canonical
from longstraw_agents.types import LogpArray, TokenArray

DIGEST_BYTES = 16
#: Tokens of a span, at most: what a range read decompresses too much of at either end.
SPAN_TOKENS = 4096
#: Positions between two marks: what an append must hash again, at most.
MARK_EVERY = 1024
#: Chain digest of no tokens.
EMPTY_CHAIN = bytes(DIGEST_BYTES)

_LEVEL = 9
_codecs = threading.local()


def digest(content: bytes) -> bytes:
    """The name of a blob with this (uncompressed) content."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def seal(table: str, values: object) -> bytes:
    """Digest of a row's values (JSON-able; bytes as hexadecimal strings) for its `seal` column."""
    return digest(f"{table}\0{canonical(values)}".encode())


def turn_digest(
    observation_tokens: int,
    action_tokens: int,
    policy_version: int,
    reward: float,
    reward_parts: dict[str, float] | None,
    spans: Iterable[tuple[bytes, bytes | None]],
    source: bytes | None,
    notes: dict[str, Any] | None,
    calls: Iterable[bytes],
) -> bytes:
    """Digest of a turn's content, from what its rows hold. Without notes it is what it was before there were any."""
    named = [[tokens.hex(), behaviour and behaviour.hex()] for tokens, behaviour in spans]
    rest = [observation_tokens, action_tokens, policy_version, reward, reward_parts, source and source.hex()]
    rest += [notes] if notes else []
    return seal("turn", [rest, named, [call.hex() for call in calls]])


def compress(content: bytes) -> bytes:
    """What is kept of a blob: a byte for the codec, and the compressed content."""
    if content[:1] in (b"\2", b"\4"):
        return b"L" + content[:1] + lzma.compress(content[1:], lzma.FORMAT_RAW, filters=_filters(content[0]))
    if not hasattr(_codecs, "compressor"):
        _codecs.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    return b"Z" + _codecs.compressor.compress(content)


def decompress(name: bytes, data: bytes) -> bytes:
    """The content of blob `name`, checked. Raises CorruptionError if it is not what the name says."""
    try:
        content = _ids_content(data) if data[:1] == b"L" else _zstd_content(data)
    except (lzma.LZMAError, zstandard.ZstdError, IndexError, MemoryError) as error:
        raise CorruptionError(f"blob {name.hex()} cannot be decompressed ({error})") from None
    if digest(content) != name:
        raise CorruptionError(f"blob {name.hex()} holds other content than its digest says")
    return content


def _filters(width: int) -> list[dict[str, int]]:
    """LZMA's settings for integers of `width` bytes."""
    position = {2: 1, 4: 2}.get(width, 0)
    settings = {"dict_size": 16384, "lc": 0, "lp": position, "pb": position, "mf": lzma.MF_BT2, "nice_len": 64}
    return [{"id": lzma.FILTER_LZMA1, **settings}]


def _ids_content(data: bytes) -> bytes:
    """Decodes no more than the longest span, whatever a damaged blob asks for."""
    decoder = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_filters(data[1]))
    return data[1:2] + decoder.decompress(data[2:], 4 * SPAN_TOKENS)


def _zstd_content(data: bytes) -> bytes:
    """Decodes what the frame says, within reason."""
    if not hasattr(_codecs, "decompressor"):
        _codecs.decompressor = zstandard.ZstdDecompressor()
    size = zstandard.frame_content_size(data[1:])
    if data[:1] != b"Z" or not 0 <= size <= 2**31:
        raise zstandard.ZstdError(f"not a frame of a sensible size: {size}")
    return _codecs.decompressor.decompress(data[1:])


def as_ids(values: npt.ArrayLike, what: str) -> TokenArray:
    """`values` as token ids [T] int32. Raises TokenError for anything but a vector of whole numbers in [0, 2**31)."""
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TokenError(f"{what} must be a vector of integers, got shape {array.shape} of {array.dtype}")
    if array.min() < 0 or array.max() >= 2**31:
        raise TokenError(f"{what} must lie in [0, 2**31), got {array.min()} to {array.max()}")
    return array.astype(np.int32)


def encode_ids(ids: TokenArray) -> bytes:
    """Ids [T] as bytes; the shorter width where it holds them."""
    wide = bool(len(ids)) and int(ids.max()) >= 2**16
    return (b"\4" if wide else b"\2") + ids.astype("<u4" if wide else "<u2").tobytes()


def decode_ids(content: bytes) -> TokenArray:
    """Inverse of `encode_ids`."""
    return np.frombuffer(content, "<u4" if content[:1] == b"\4" else "<u2", offset=1).astype(np.int32)


def encode_behaviour(behaviour: LogpArray) -> bytes:
    """Log-probabilities [A] as bytes."""
    return b"b" + np.asarray(behaviour).astype("<f4").tobytes()


def decode_behaviour(content: bytes) -> LogpArray:
    """Inverse of `encode_behaviour`."""
    return np.frombuffer(content, "<f4", offset=1).astype(np.float32)


def chain(mark: bytes, ids: TokenArray) -> bytes:
    """Chain digest after `ids`, which follow the mark whose digest is `mark`; equals it where there are none."""
    return digest(mark + ids.astype("<u4").tobytes()) if len(ids) else mark


def marks(mark: bytes, tail: TokenArray, ids: TokenArray) -> tuple[list[bytes], bytes, TokenArray]:
    """Continues a chain whose last mark is `mark`, `tail` (fewer than MARK_EVERY ids) positions ago, by `ids`.

    Returns the new marks in order, the last mark, and the ids after it.
    """
    pending = np.concatenate([tail, ids])
    made: list[bytes] = []
    for block in _blocks(pending):
        mark = chain(mark, block)
        made.append(mark)
    return made, mark, pending[len(made) * MARK_EVERY :]


def _blocks(ids: TokenArray) -> Iterator[TokenArray]:
    """The complete blocks of MARK_EVERY ids."""
    for start in range(0, len(ids) - MARK_EVERY + 1, MARK_EVERY):
        yield ids[start : start + MARK_EVERY]
