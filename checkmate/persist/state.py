"""A state dict as one flat range of bytes and a small manifest, and back: exact to the bit, without pickle.

The data of a checkpoint are the *spans* one after the other: of each piece of memory that tensors of the state lie in,
the part from the first byte used to the last. Tensors that share memory share a span, so that it is stored once and
they share memory again when loaded; gaps between strided elements are stored with it. The manifest is a msgpack map:
"tree", the nested state in the plain form of ``checkmate.plain`` with each tensor as its index; "tensors", a list of
[span, dtype, shape, stride, offset in elements, conjugated, negated], span -1 for tensors without elements; "spans", a
list of [bytes, device]; and what the caller adds.
"""

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from checkmate import plain
from checkmate.config import CheckmateError
from checkmate.tensors import dtype_name, dtype_of

VERSION = 1
_ALIGN = 16
"""Spans begin at multiples of the largest element size, so that an offset is a whole number of any elements."""

Device = str | torch.device
MapLocation = Device | Mapping[str, Device] | None
"""Where loaded tensors go: None, where they were; a device, all of them; a map, by the device that they were on."""
MemoryKey = tuple[torch.device, int]
"""Device and address of a piece of memory, whatever part of it a tensor uses."""
NOWHERE: MemoryKey = (torch.device("meta"), 0)


class StateError(CheckmateError):
    """A state that cannot be stored, or a stored one that makes no sense or does not fit; the text names the place."""


@dataclass(frozen=True)
class Span:
    """``nbytes`` live bytes from ``first`` of a storage on any device. They are at ``offset`` of the checkpoint's data.

    ``gated``: only the optimizer's step changes them, which waits for their copy.
    """

    storage: torch.UntypedStorage
    first: int
    nbytes: int
    offset: int
    gated: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def address(self) -> int:
        return self.storage.data_ptr() + self.first

    @functools.cached_property
    def memory(self) -> Tensor:
        """The bytes as a 1-d uint8 tensor."""
        memory = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return memory.set_(self.storage, self.first, (self.nbytes,), (1,))


@dataclass(frozen=True)
class Packed:
    """A state dict ready to be stored. ``tensors``: the live tensors that have elements, and where each is."""

    manifest: dict[str, Any]
    spans: dict[MemoryKey, Span]
    tensors: list[tuple[Tensor, Span]]
    data_bytes: int

    def metadata(self, **more: Any) -> bytes:
        """The manifest as stored, with plain values of the caller's. Raises StateError: too deep, or large."""
        try:
            data: bytes = msgpack.packb({**self.manifest, **more})
        except ValueError as error:
            raise StateError(f"the state cannot be stored: {error}") from None
        return data


def pack(state: Any, gated: Collection[MemoryKey] = ()) -> Packed:
    """Describe a nested state; nothing is copied, only read. ``gated``: memory that only an optimizer's step changes.

    CUDA memory comes first in the data, and memory that isn't gated before what is, so that it is copied first. Raises
    StateError naming the place of a value that has no plain form, or of a tensor that isn't a plain one.
    """
    tensors: dict[int, Tensor] = {}
    order: dict[int, int] = {}

    def index(tensor: Tensor, where: str) -> dict[str, Any]:
        _require_plain(tensor, where)
        tensors[id(tensor)] = tensor  # kept, so that no other gets the same id
        return {"index": order.setdefault(id(tensor), len(order))}

    try:
        tree = plain.encode(state, tensor=index)
    except RecursionError:
        raise StateError("the state is nested too deeply, or holds itself: it cannot be stored") from None
    except (CheckmateError, ValueError) as error:
        raise StateError(str(error)) from None
    live = [(tensor, memory_key(tensor)) for tensor in tensors.values()]
    pieces = _Pieces()
    for tensor, key in live:
        pieces.add(tensor, key)
    spans = pieces.spans(gated)
    numbers = {key: number for number, key in enumerate(spans)}
    manifest = {
        "version": VERSION,
        "tree": tree,
        "tensors": [_describe(tensor, numbers.get(key, -1), spans.get(key)) for tensor, key in live],
        "spans": [[span.nbytes, _name_of_device(key[0])] for key, span in spans.items()],
    }
    data_bytes = sum(span.nbytes for span in spans.values())
    return Packed(manifest, spans, [(tensor, spans[key]) for tensor, key in live if key in spans], data_bytes)


def parse_manifest(metadata: bytes) -> dict[str, Any]:
    """A manifest as it was stored. Raises StateError for what is none, or one of a later version."""
    try:
        manifest: dict[str, Any] = msgpack.unpackb(metadata, strict_map_key=False)
        version = manifest["version"]
    except Exception as error:
        raise StateError(f"the manifest makes no sense: {error!r}") from None
    if version != VERSION:
        raise StateError(f"the manifest has version {version}: this Checkmate reads {VERSION}; use a newer one")
    return manifest


@dataclass(frozen=True)
class Stored:
    """A manifest read back: allocate ``spans``, fill them, then ``unpack``."""

    manifest: dict[str, Any]
    spans: list[Span]
    devices: list[str]

    @classmethod
    def of(cls, metadata: bytes, data_bytes: int) -> "Stored":
        """Parse and check a manifest, and allocate CPU memory for its spans. Raises StateError."""
        manifest = parse_manifest(metadata)
        try:
            sizes = [(_size(nbytes), str(device)) for nbytes, device in manifest["spans"]]
        except StateError:
            raise
        except Exception as error:
            raise StateError(f"the manifest makes no sense: {error!r}") from None
        if sum(nbytes for nbytes, _ in sizes) != data_bytes:
            raise StateError(f"the manifest describes other data than the {data_bytes} bytes that are stored")
        spans, offset = [], 0
        for nbytes, _ in sizes:
            spans.append(Span(torch.empty(nbytes, dtype=torch.uint8).untyped_storage(), 0, nbytes, offset))
            offset += nbytes
        return cls(manifest, spans, [device for _, device in sizes])

    def unpack(self, map_location: MapLocation = None) -> Any:
        """The state, its tensors in the spans' memory or moved to where ``map_location`` says."""
        memories = [
            span.memory.to(_destination(device, map_location))
            for span, device in zip(self.spans, self.devices, strict=True)
        ]
        try:
            tensors = [_rebuild(entry, memories) for entry in self.manifest["tensors"]]
            return plain.decode(self.manifest["tree"], lambda fields: tensors[fields["index"]])
        except CheckmateError:
            raise
        except Exception as error:
            raise StateError(f"the manifest makes no sense: {error!r}") from None


@dataclass
class _Pieces:
    """Bytes used of each piece of memory, by device and address."""

    used: dict[MemoryKey, tuple[torch.UntypedStorage, int, int]] = field(default_factory=dict)

    def add(self, tensor: Tensor, key: MemoryKey) -> None:
        if key == NOWHERE:
            return
        start, end = int(tensor.storage_offset()) * tensor.element_size(), _end(tensor)
        start -= start % _ALIGN
        if held := self.used.get(key):
            storage, first, last = held
            self.used[key] = storage, min(first, start), max(last, end)
        else:
            self.used[key] = tensor.untyped_storage(), start, end

    def spans(self, gated: Collection[MemoryKey]) -> dict[MemoryKey, Span]:
        """One after the other, CUDA first: what has to be copied from devices is in as few chunks as can be."""
        spans, offset = {}, 0
        for key in sorted(self.used, key=lambda key: (not self.used[key][0].is_cuda, key in gated)):
            storage, first, last = self.used[key]
            spans[key] = Span(storage, first, last - first, offset, key in gated)
            offset += last - first
        return spans


def memory_key(tensor: Tensor) -> MemoryKey:
    """Of the memory that a tensor lies in; NOWHERE without elements."""
    return (tensor.device, tensor.untyped_storage().data_ptr()) if tensor.numel() else NOWHERE


def _end(tensor: Tensor) -> int:
    """The byte of its storage behind the last one of a tensor that has elements."""
    if tensor.is_contiguous():
        reach = tensor.numel()
    else:
        reach = 1 + sum((n - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + reach) * tensor.element_size()


def _describe(tensor: Tensor, number: int, span: Span | None) -> list[Any]:
    dtype, shape, stride = dtype_name(tensor.dtype), tensor.shape, tensor.stride()
    if span is None:
        return [-1, dtype, shape, stride, _name_of_device(tensor.device), False, False]
    first = tensor.storage_offset() - span.first // tensor.element_size()
    return [number, dtype, shape, stride, first, tensor.is_conj(), tensor.is_neg()]


@functools.cache
def _name_of_device(device: torch.device) -> str:
    return str(device)


def _rebuild(entry: Sequence[Any], memories: Sequence[Tensor]) -> Tensor:
    number, dtype_name, shape, stride, first, conjugated, negated = entry
    dtype, shape, stride = dtype_of(dtype_name), [_size(n) for n in shape], [_size(n) for n in stride]
    if number == -1:
        if math.prod(shape):
            raise StateError(f"a tensor of shape {shape} has no data")
        return torch.empty_strided(shape, stride, dtype=dtype)
    memory = memories[_size(number)]
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if 0 in shape or (_size(first) + reach + 1) * dtype.itemsize > memory.numel():
        raise StateError(f"a tensor of shape {shape} reaches beyond its {memory.numel()} bytes")
    tensor = torch.empty(0, dtype=dtype, device=memory.device)
    tensor.set_(memory.untyped_storage(), first, shape, stride)
    tensor = tensor.conj() if conjugated else tensor
    return torch._neg_view(tensor) if negated else tensor


def _destination(device: str, map_location: MapLocation) -> Device:
    wanted: Device = device
    if isinstance(map_location, Mapping):
        wanted = map_location.get(device, device)
    elif map_location is not None:
        wanted = map_location
    if str(wanted).startswith("cuda") and not torch.cuda.is_available():
        raise StateError(f"tensors of {device} should go to {wanted}, which is not here: give map_location='cpu'")
    return wanted


def _require_plain(tensor: Tensor, where: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise StateError(f"{where} is a sparse, nested or quantized tensor, which cannot be stored; make it dense")
    if is_traceable_wrapper_subclass(tensor):
        kind = type(tensor).__name__
        raise StateError(f"{where} is a {kind}: only plain tensors can be stored; for a DTensor give its to_local()")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise StateError(f"{where} is on device {tensor.device}: only tensors on cpu and cuda can be stored")
    if is_lazy(tensor):
        raise StateError(f"{where} is not initialised yet: run the model once before it is saved")
    if not _has_memory(tensor):
        raise StateError(
            f"{where} is a {type(tensor).__name__} without memory of its own (freed, fake, or a wrapper of another): "
            f"only plain tensors can be stored"
        )


def _has_memory(tensor: Tensor) -> bool:
    """False where reading its elements would read what isn't there."""
    if not tensor.numel():
        return True
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr() != 0 and storage.device == tensor.device and _end(tensor) <= storage.nbytes()
    except RuntimeError:  # torch's, for tensors that have none at all
        return False


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise StateError(f"the manifest makes no sense: {value!r} must be a size")
    return value


def chunk_pieces(spans: Iterable[Span], chunk_bytes: int) -> Iterator[tuple[int, list[tuple[Span, int, int]]]]:
    """Chunks in order, each as its index and its pieces: (span, first byte of it, bytes)."""
    pieces: list[tuple[Span, int, int]] = []
    chunk = 0
    for span in spans:
        position = span.offset
        while position < span.end:
            if position // chunk_bytes != chunk:
                yield chunk, pieces
                chunk, pieces = position // chunk_bytes, []
            end = min(span.end, (chunk + 1) * chunk_bytes)
            pieces.append((span, position - span.offset, end - position))
            position = end
    if pieces:
        yield chunk, pieces
