"""Device-to-host copies on a side stream, behind a seam that the CPU can stand in for.

DESIGN. A snapshot of device memory costs the host nothing but the enqueueing:

1. The side stream first waits for an event of the compute stream, so that the copies see every
   kernel that was queued before ``save`` (the update of the last step among them).
2. Copies into page-locked staging memory run on the side stream, beside forward and backward.
3. After each batch of copies an event is recorded (a *mark*); whoever needs the bytes in host
   memory waits for the mark, never for the whole device.
4. Before the optimizer changes anything in place, the compute stream waits for the last mark: a
   wait on the device. The host is not blocked.

``CudaStream`` does this with torch's streams and events; ``InlineStream`` does the same calls on
the CPU, in order and at once, so that the path through staging and engine is the same code.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, Any, Protocol

from sharded_ckpt.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)


class Mark(Protocol):
    """A point in the order of copies."""

    def reached(self) -> bool:
        """Whether every copy before the mark is finished. Never blocks."""

    def wait(self) -> None:
        """Blocks the calling thread until the mark is reached."""


class CopyStream(Protocol):
    """Where device-to-host copies of one snapshot are queued."""

    def begin(self) -> None:
        """Orders all later copies after the work already queued on the compute stream."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues ``target[:] = source``; both are flat uint8 tensors of equal size."""

    def mark(self) -> Mark:
        """A mark behind all copies queued so far."""

    def hold_compute(self, mark: Mark) -> None:
        """Makes the compute stream wait for ``mark`` before it runs anything queued later."""

    def page_lock(self, address: int, nbytes: int) -> None:
        """Page-locks staging memory, so that copies into it do not block the host."""

    def page_unlock(self, address: int) -> None:
        """Undoes :meth:`page_lock`."""


class CudaMark:
    """A mark that is a CUDA event."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def reached(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()  # releases the GIL while it waits


class CudaStream:
    """Copies on a side stream of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cuda = torch.cuda
        self._device = device
        self._stream = torch.cuda.Stream(device=device)

    def begin(self) -> None:
        ready = self._cuda.Event()
        ready.record(self._cuda.current_stream(self._device))
        self._stream.wait_event(ready)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        # The caching allocator must not hand this memory out again before the copy has read it,
        # even if the training code drops its last reference meanwhile.
        source.record_stream(self._stream)

    def mark(self) -> CudaMark:
        # Waited for by a thread of ours: it must sleep, not spin on a core of the trainer's.
        event = self._cuda.Event(blocking=True)
        event.record(self._stream)
        return CudaMark(event)

    def hold_compute(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        self._cuda.current_stream(self._device).wait_event(mark.event)

    def page_lock(self, address: int, nbytes: int) -> None:
        # torch's own pinned allocator rounds sizes up to powers of two; registering memory that
        # the engine allocated keeps the bound on host memory exact. Portable (flag 1): the memory
        # is locked for every device, whichever one the calling thread has chosen.
        with self._cuda.device(self._device):
            code = int(self._cuda.cudart().cudaHostRegister(address, nbytes, 1))
        if code != 0:
            raise UnsupportedError(
                f"cudaHostRegister of {nbytes} bytes of staging memory failed with CUDA error "
                f"{code}; lower staging_nbytes or raise the limit on locked memory"
            )

    def page_unlock(self, address: int) -> None:
        with self._cuda.device(self._device):
            code = int(self._cuda.cudart().cudaHostUnregister(address))
        if code != 0:
            log.warning("cudaHostUnregister of staging memory failed with CUDA error %d", code)


class InlineMark:
    """A mark that is reached as soon as it is made."""

    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        return


class InlineStream:
    """The same calls on the CPU: copies happen at once, in the calling thread."""

    def begin(self) -> None:
        return

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> InlineMark:
        return InlineMark()

    def hold_compute(self, mark: Mark) -> None:
        mark.wait()

    def page_lock(self, address: int, nbytes: int) -> None:
        return

    def page_unlock(self, address: int) -> None:
        return


def stream_for(device: torch.device) -> CopyStream | None:
    """The stream that copies off ``device``; ``None`` for host memory, which threads copy.

    Raises :class:`UnsupportedError` for devices that have no such path yet.
    """
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return CudaStream(device)
    raise UnsupportedError(
        f"tensors on device {device} cannot be staged: only cpu and cuda are supported"
    )


def host_bytes(address: int, nbytes: int) -> torch.Tensor:
    """A flat uint8 tensor over existing host memory; the caller keeps that memory alive."""
    import torch

    raw = (ctypes.c_ubyte * nbytes).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8)
