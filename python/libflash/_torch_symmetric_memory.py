"""Memory that all ranks of a process group can read and write, for the transport `symmetric_memory`: PyTorch's symmetric memory.

It is used if every rank has it and can reach all other ranks: the ranks agree on this once for each group, in its first call. A
group's memory grows when a call needs more, for which all ranks communicate, and is freed with the group.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ._errors import InvalidError, UnsupportedError
from ._torch_context_group import Axis
from ._torch_context_transport import Pair, Peers

Tensor = torch.Tensor
TRANSPORTS = ("auto", "messages", "symmetric_memory")
GRANULARITY = 1 << 21  # bytes
TIMEOUT = 600_000  # milliseconds, if the group has no timeout
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Provider(Protocol):
    """Allocates symmetric memory for tensors on one type of device."""

    def facts(self, device: torch.device) -> dict[str, Any]:
        """The facts that the other ranks need about this rank; `lacks`: why it cannot have symmetric memory, or ''."""

    def obstacle(self, facts_of_all: Sequence[dict[str, Any]]) -> str:
        """Why ranks with these facts cannot share memory, or ''. The result is the same on all ranks."""

    def allocate(self, size: int, device: torch.device) -> Any:
        """Memory of this rank."""

    def connect(self, block: Any, axis: Axis) -> Peers:
        """The memory of all ranks, which call it together. The result must not refer to the group, which refers to it."""


class GpuProvider:
    """PyTorch's symmetric memory: every rank maps the memory of all other ranks."""

    def facts(self, device: torch.device) -> dict[str, Any]:
        others = [n for n in range(torch.cuda.device_count()) if n != device.index]
        reached = [gpu_name(n) for n in others if torch.cuda.can_device_access_peer(device.index, n)]
        return {"lacks": what_pytorch_lacks(device), "host": host(), "number": device.index, "gpu": gpu_name(device.index),
                "reaches": reached}  # fmt: skip

    def obstacle(self, facts_of_all: Sequence[dict[str, Any]]) -> str:
        if lacking := first_of([facts["lacks"] for facts in facts_of_all]):
            return lacking
        if any(facts["host"] != facts_of_all[0]["host"] for facts in facts_of_all):
            return "the ranks are on several hosts, or in several containers"
        if len({facts["number"] for facts in facts_of_all}) < len(facts_of_all):
            return "the GPUs of two ranks have one number (CUDA_VISIBLE_DEVICES), which PyTorch's symmetric memory refuses"
        for rank, facts in enumerate(facts_of_all):
            for other, peer in enumerate(facts_of_all):
                if other != rank and peer["gpu"] not in facts["reaches"]:
                    return f"the GPU of rank {rank} cannot read the memory of that of rank {other}"
        return ""

    def allocate(self, size: int, device: torch.device) -> Tensor:
        """Allocate outside of the pool that PyTorch's empty() uses: the pool would keep blocks that were replaced."""
        made: Tensor = pytorch()._SymmetricMemory.empty_strided_p2p((size,), [1], torch.uint8, device)
        return made

    def connect(self, block: Tensor, axis: Axis) -> GpuPeers:
        with without_multicast():
            handle = pytorch().rendezvous(block, axis.group)
        if handle is None:
            raise RuntimeError("PyTorch does not know this memory")
        return GpuPeers(block, handle, timeout_of(axis.group, block.device))


def pytorch() -> Any:
    """PyTorch's module of symmetric memory."""
    return importlib.import_module("torch.distributed._symmetric_memory")


def what_pytorch_lacks(device: torch.device) -> str:
    try:
        module = pytorch()
        backend = module.get_backend(device) if hasattr(module, "get_backend") else "CUDA"
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"this PyTorch has no symmetric memory ({str(error).splitlines()[0]})"
    return "" if backend == "CUDA" else f"PyTorch's symmetric memory has the backend {backend}; it must be CUDA"


def gpu_name(number: int) -> str:
    """A name of the GPU that is the same in all processes of a host."""
    properties = torch.cuda.get_device_properties(number)
    return str(getattr(properties, "uuid", number))


def host() -> tuple[str, ...]:
    """The host, and the values that must be equal for PyTorch's processes to find each other by a file."""
    folders = [os.environ[name] for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if name in os.environ]
    made = [socket.gethostname(), *folders[:1]]
    for path in ("/proc/self/ns/mnt", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            made.append(os.readlink(path))
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        made.append(file.read().strip())
    return tuple(made)


@contextlib.contextmanager
def without_multicast() -> Iterator[None]:
    """Keeps PyTorch from adding a multicast object, which is not needed here and which some machines refuse."""
    before = os.environ.get(NO_MULTICAST)
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_MULTICAST]
        else:
            os.environ[NO_MULTICAST] = before


def timeout_of(group: Any, device: torch.device) -> int:
    """The timeout in milliseconds for a rank that does not reach a barrier: the timeout of the group's messages."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return int(1000 * group._get_backend(device).options._timeout.total_seconds())
    return TIMEOUT


class Event:
    """Copies in flight on a stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self.device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class GpuPeers:
    """Views of symmetric memory, a stream for copies, and PyTorch's barrier: a kernel of one warp on the current stream.

    Nothing here blocks the host, and a barrier has no state except its signals in memory, which are zero before and after it. So
    calls can be captured in a graph.
    """

    def __init__(self, block: Tensor, handle: Any, timeout: int) -> None:
        self.block, self.handle, self.timeout = block, handle, timeout
        self.size = block.numel()
        self.device = block.device
        self.stream = torch.cuda.Stream(self.device)
        self.copies = False  # whether copies may be in flight
        self.last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    def begin(self) -> None:
        current = torch.cuda.current_stream(self.device)
        if self.last is not None and self.last[0] != current and not capturing(self.device):
            current.wait_event(self.last[1])

    def end(self) -> None:
        current = torch.cuda.current_stream(self.device)
        if self.copies:
            current.wait_stream(self.stream)
        self.copies = False
        if not capturing(self.device):
            self.last = current, current.record_event()

    def view(self, rank: int, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made: Tensor = self.handle.get_buffer(rank, tuple(shape), dtype, begin // dtype.itemsize)
        return made

    def barrier(self) -> None:
        self.handle.barrier(channel=0, timeout_ms=self.timeout)

    def copy(self, pairs: Sequence[Pair]) -> Event:
        """Start copies. Between contiguous tensors of one type they are cudaMemcpyAsync: work for a copy engine."""
        self.copies = True
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            return Event(self.stream.record_event(), self.device)


def capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


PROVIDERS: dict[str, Provider] = {"cuda": GpuProvider()}
NAMED = "transport is 'symmetric_memory', and "


class GroupMemory:
    """The symmetric memory of this rank's group. `obstacle`: why there is none, or '', the same on all ranks."""

    def __init__(self, axis: Axis, device: torch.device, provider: Provider) -> None:
        self.device, self.provider = device, provider
        self.peers: Peers | None = None
        self.captured: list[Peers] = []  # used by graphs, whose lifetime is not known here
        self.obstacle = provider.obstacle(gathered(axis, device, provider.facts(device)))

    @property
    def bytes(self) -> int:
        """The bytes that this rank has allocated."""
        return sum(peers.size for peers in {id(x): x for x in (self.peers, *self.captured) if x is not None}.values())

    def reserve(self, axis: Axis, size: int) -> Peers | None:
        """Sizes follow from shapes, which are the same on all ranks. So all ranks grow their memory in the same calls."""
        if self.obstacle:
            return None
        if self.peers is None or self.peers.size < size:
            self.grow(axis, max(1, -(-size // GRANULARITY)) * GRANULARITY)
        if self.peers is not None and self.peers not in self.captured and capturing(self.device):
            self.captured.append(self.peers)
        return self.peers

    def grow(self, axis: Axis, size: int) -> None:
        if capturing(self.device):
            raise InvalidError(
                f"{size} bytes of symmetric memory are needed inside the capture of a graph, where they cannot be allocated: "
                "call once with these shapes before the capture, forward and backward, or give transport='messages'"
            )
        self.peers = None
        block: Any = None
        failed = ""
        try:
            block = self.provider.allocate(size, self.device)
        except RuntimeError as error:
            failed = f"{size} bytes could not be allocated: {str(error).splitlines()[0]}"
        self.obstacle = first_of(gathered(axis, self.device, failed))
        if self.obstacle:
            return
        peers: Peers | None = None
        try:
            peers = self.provider.connect(block, axis)
        except RuntimeError as error:
            failed = f"the ranks could not map each other's memory: {str(error).splitlines()[0]}"
        self.obstacle = first_of(gathered(axis, self.device, failed))
        self.peers = None if self.obstacle else peers


def gathered(axis: Axis, device: torch.device, mine: Any) -> list[Any]:
    """The value of `mine` of each rank."""
    made: list[Any] = [None] * axis.size
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        dist.all_gather_object(made, mine, group=axis.group)
    return made


def first_of(texts: Sequence[str]) -> str:
    """The text of the first rank that has one."""
    return next((f"rank {rank}: {said}" for rank, said in enumerate(texts) if said), "")


class Required:
    """Symmetric memory for a call that requires it: raises an error if there is none."""

    def __init__(self, memory: GroupMemory) -> None:
        self.memory = memory

    def reserve(self, axis: Axis, size: int) -> Peers:
        peers = self.memory.reserve(axis, size)
        if peers is None:
            raise UnsupportedError(NAMED + self.memory.obstacle)
        return peers


_memories: weakref.WeakKeyDictionary[Any, dict[torch.device, GroupMemory]] = weakref.WeakKeyDictionary()


def check_transport(transport: Any) -> None:
    if transport not in TRANSPORTS:
        raise InvalidError(f"transport is {transport!r}; it must be one of {', '.join(TRANSPORTS)}")


def memory_of(axis: Axis, device: torch.device, transport: str) -> GroupMemory | Required | None:
    """The memory for calls with tensors on this device. All ranks communicate in a group's first call; later calls look it up."""
    if axis.size == 1 or transport == "messages":
        return None
    named = transport == "symmetric_memory"
    provider = PROVIDERS.get(device.type)
    if provider is None:
        if named:
            raise UnsupportedError(f"{NAMED}the tensors are on the device {device.type}, where there is none")
        return None
    known = _memories.setdefault(axis.group, {})
    if device not in known:
        if capturing(device):
            raise InvalidError(
                "this is the first call of its group and inside the capture of a graph, where the ranks cannot agree on a "
                "transport: call once before the capture, or give transport='messages'"
            )
        known[device] = GroupMemory(axis, device, provider)
    memory = known[device]
    if not memory.obstacle:
        return Required(memory) if named else memory
    if named:
        raise UnsupportedError(NAMED + memory.obstacle)
    return None


def described(axis: Axis, device: torch.device, transport: str) -> tuple[str, str]:
    """The transport that a call uses, and the reason, as far as this rank knows. Sends nothing."""
    if transport != "auto":
        return transport, "requested"
    provider = PROVIDERS.get(device.type)
    if provider is None:
        return "messages", f"tensors on the device {device.type} are sent by torch.distributed"
    memory = _memories.get(axis.group, {}).get(device)
    if memory is not None and memory.obstacle:
        return "messages", memory.obstacle
    if memory is not None:
        return "symmetric_memory", f"every rank can read the memory of the others; {memory.bytes} bytes on each"
    lacks = provider.facts(device)["lacks"]
    if lacks:
        return "messages", lacks
    return "symmetric_memory", "if every rank can read the memory of the others, which they find out in their first call"


def held() -> int:
    """The bytes of all groups on this rank. PyTorch's allocator does not count them."""
    return sum(memory.bytes for known in _memories.values() for memory in known.values())


def release() -> None:
    """Free the memory of all groups, on all ranks; their next calls allocate it again. Not while a graph uses the memory."""
    _memories.clear()
