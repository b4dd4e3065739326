"""What two workers say to each other, as data: msgpack on the wire, checked when it is read."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import msgpack

from trillion_infer.core.errors import TrillionInferError
from trillion_infer.transfer.handoff.wire import pack


class ProtocolError(TrillionInferError, ValueError):
    """A peer sent something that is no message of this protocol."""


@dataclass(frozen=True)
class Ask:
    """Decode to prefill: compute the KV of `prompt_ids`, and offer its blocks from number `have` on.

    next_id: the token after them, on which the KV of models that draft depends, too. key: names this attempt at this
    request, and no other ever. budget_s: after so many seconds nobody waits for it.
    """

    key: str
    prompt_ids: tuple[int, ...]
    next_id: int
    have: int
    salt: str
    adapter: str
    priority: int
    budget_s: float


@dataclass(frozen=True)
class Renew:
    """Decode to prefill: these attempts are still waited for."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class Resend:
    """Decode to prefill: the transfer of round `round - 1` failed; offer the leased pages once more."""

    key: str
    round: int


@dataclass(frozen=True)
class Ack:
    """Decode to prefill: everything has arrived and was verified; the lease is over."""

    key: str


@dataclass(frozen=True)
class Abort:
    """Decode to prefill: nobody waits for this any more."""

    key: str


@dataclass(frozen=True)
class Piece:
    """Pages of one pool that travel together: those of blocks first .. first + count - 1.

    digest: of the bytes, over all pages of the piece. ticket: what the transport fetches them by. size: bytes.
    """

    pool: int
    first: int
    count: int
    digest: bytes
    ticket: int
    size: int


@dataclass(frozen=True)
class Offer:
    """Prefill to decode: part number `part` of an attempt is leased and can be fetched; `last`: the prompt is done.

    prompt: digest of the prompt that the pages were computed for. cached: prompt tokens that needed no computing.
    """

    key: str
    round: int
    part: int
    last: bool
    prompt: bytes
    cached: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Refused:
    """Prefill to decode: no (further) offer will come. kind: `bad` (the request itself), `busy`, `gone` or `failed`."""

    key: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Beat:
    """Prefill to decode: a sign of life, with the prompt tokens in the queue."""

    queued_tokens: int
    accepts: bool


Message = Ask | Renew | Resend | Ack | Abort | Offer | Refused | Beat


class MessageCodec:
    """Messages as bytes: `[name, fields in order]`, without pickle. Nothing but a whole message is accepted."""

    _TYPES: ClassVar[Mapping[str, type]] = {kind.__name__: kind for kind in get_args(Message)}

    def pack(self, message: Message) -> bytes:
        return pack([type(message).__name__, *_fields(message)])

    def unpack(self, data: bytes) -> Message:
        """Raises ProtocolError for anything that `pack` could not have made."""
        try:
            name, *values = msgpack.unpackb(data, raw=False, strict_map_key=True)
            kind = self._TYPES[name]
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise ProtocolError(f"{len(data)} bytes are no message of this protocol ({error!r}).") from error
        return _build(kind, values)


def _fields(message: Any) -> list[Any]:
    values = []
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if isinstance(value, tuple):
            value = [_fields(each) if dataclasses.is_dataclass(each) else each for each in value]
        values.append(value)
    return values


def _build(kind: type, values: Any) -> Any:
    hints = get_type_hints(kind)
    if not isinstance(values, list) or len(values) != len(hints):
        raise ProtocolError(f"{kind.__name__} has {len(hints)} fields; {values!r:.80} was sent.")
    return kind(*(_checked(kind, name, hint, value) for (name, hint), value in zip(hints.items(), values, strict=True)))


def _checked(kind: type, name: str, hint: Any, value: Any) -> Any:
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        if isinstance(value, list):
            if dataclasses.is_dataclass(inner):
                return tuple(_build(inner, each) for each in value)  # pyright: ignore[reportArgumentType]
            return tuple(_checked(kind, name, inner, each) for each in value)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif type(value) is hint:
        return value
    raise ProtocolError(f"{kind.__name__}.{name} is {value!r:.80}; it must be {hint}.")
