"""How the ranks of one job tell each other small things: a key-value store with deadlines.

No collective runs here, so a background thread may use a group while the training thread is inside
an all-reduce. Each thread takes its own :meth:`Group.clone`. A key is used once: values are never
overwritten with other values, so a reader cannot see a stale one.

Waiting is polling with a growing pause. A blocking ``wait`` of a c10d store would hold the
connection, writes warnings to stderr each time it runs out, and takes whole seconds with a
``FileStore``; a poll takes some 25 microseconds of a ``TCPStore``.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sharded_ckpt.errors import GroupError, GroupTimeout

T = TypeVar("T")

PART_NBYTES = 4 << 20  # a TCPStore drops the connection at a value above 8 MiB
BATCH_KEYS = 64
OP_TIMEOUT_S = 60.0  # for one request that should be answered at once
_FIRST_PAUSE_S = 0.001
_LAST_ANSWER_S = 2.0  # for a request that is on its way when the deadline comes
_WHOLE, _PARTS = b"w", b"p"  # first byte of a stored value


@dataclass(frozen=True, slots=True)
class Collected:
    """``values`` in the order of the keys, ``None`` where missing; ``stop`` is what ended it."""

    values: list[bytes | None]
    stop: bytes | None


class Group(Protocol):
    """The ranks of a job. Every method ends within its deadline, or within ``OP_TIMEOUT_S``.

    :class:`GroupTimeout` says who did not answer; :class:`GroupError` that nobody can be asked.
    """

    rank: int
    world_size: int

    def clone(self) -> Group:
        """The same group over a connection of its own, for another thread."""

    def publish(self, key: str, data: bytes) -> None:
        """Makes ``data`` readable by all ranks under ``key``."""

    def peek(self, key: str) -> bytes | None:
        """The value of ``key`` if it is there. Does not wait."""

    def fetch(self, key: str, timeout_s: float) -> bytes:
        """The value of ``key``, once some rank has published it."""

    def collect(
        self,
        keys: Sequence[str],
        timeout_s: float,
        stop_key: str | None = None,
        *,
        patience_s: float = 0.0,
    ) -> Collected:
        """The values of all ``keys``, or of those that came until the deadline or ``stop_key``.

        ``patience_s`` is how long the store itself may take to answer, where that is longer than
        ``timeout_s``: a busy host is not a dead one.
        """

    def gather(self, key: str, data: bytes, timeout_s: float) -> list[bytes]:
        """On rank 0 the data of every rank, in rank order; elsewhere an empty list, at once."""

    def broadcast(self, key: str, data: bytes | None, timeout_s: float) -> bytes:
        """Rank 0's ``data`` on every rank."""

    def count(self, key: str, more: int = 1) -> int:
        """Adds to a counter; returns its new value. Counters begin at 0."""

    def await_count(self, key: str, value: int, timeout_s: float) -> bool:
        """Whether a counter has come to ``value`` within ``timeout_s``."""

    def forget(self, keys: Sequence[str]) -> None:
        """Removes keys and counters; those not there are skipped."""

    def close(self) -> None:
        """Gives back the connection of this clone."""


class _KeyValueGroup:
    """All of :class:`Group` in terms of six requests to a store."""

    def __init__(self, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        self.rank = rank
        self.world_size = world_size
        # Bounds what polling costs the store's one server: some 20,000 requests a second.
        self._max_pause_s = min(1.0, 0.05 + world_size / 20_000)

    # Each may take ``timeout_s`` seconds, then raises GroupTimeout.
    def _set(self, key: str, value: bytes, timeout_s: float) -> None:
        raise NotImplementedError

    def _has(self, keys: Sequence[str], timeout_s: float) -> bool:
        raise NotImplementedError

    def _get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Called only for keys that are there."""
        raise NotImplementedError

    def _add(self, key: str, more: int, timeout_s: float) -> int:
        raise NotImplementedError

    def _delete(self, key: str, timeout_s: float) -> None:
        raise NotImplementedError

    def _pause(self, seconds: float) -> None:
        raise NotImplementedError

    # ---- values

    def publish(self, key: str, data: bytes) -> None:
        if len(data) <= PART_NBYTES:
            self._set(key, _WHOLE + data, OP_TIMEOUT_S)
            return
        starts = range(0, len(data), PART_NBYTES)
        for i, start in enumerate(starts):
            self._set(f"{key}/part/{i}", data[start : start + PART_NBYTES], OP_TIMEOUT_S)
        self._set(key, _PARTS + str(len(starts)).encode(), OP_TIMEOUT_S)

    def peek(self, key: str) -> bytes | None:
        if not self._has([key], OP_TIMEOUT_S):
            return None
        return self._values([key], OP_TIMEOUT_S)[0]

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            if not self._has([key], OP_TIMEOUT_S):
                continue
            (head,) = self._get([key], OP_TIMEOUT_S)
            for part in _part_keys(key, head):
                self._delete(part, OP_TIMEOUT_S)
            self._delete(key, OP_TIMEOUT_S)

    def count(self, key: str, more: int = 1) -> int:
        return self._add(key, more, OP_TIMEOUT_S)

    def _values(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        values = []
        for key, head in zip(keys, self._get(keys, timeout_s), strict=True):
            parts = _part_keys(key, head)
            values.append(
                b"".join(self._get([part], timeout_s)[0] for part in parts) if parts else head[1:]
            )
        return values

    # ---- waiting

    def await_count(self, key: str, value: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        for pause_s in self._pauses(deadline):
            if self._add(key, 0, max(_LAST_ANSWER_S, deadline - time.monotonic())) >= value:
                return True
            self._pause(pause_s)
        return False

    def fetch(self, key: str, timeout_s: float) -> bytes:
        (value,) = self.collect([key], timeout_s).values
        if value is None:
            raise GroupTimeout(
                f"rank {self.rank}: nothing came for {key!r} within {timeout_s:g} s", missing=()
            )
        return value

    def collect(
        self,
        keys: Sequence[str],
        timeout_s: float,
        stop_key: str | None = None,
        *,
        patience_s: float = 0.0,
    ) -> Collected:
        # In order and by batches: requests grow with the number of keys, not with its square.
        deadline = time.monotonic() + timeout_s
        patient_until = time.monotonic() + patience_s
        values: list[bytes | None] = []
        for first in range(0, len(keys), BATCH_KEYS):
            batch = keys[first : first + BATCH_KEYS]
            for pause_s in self._pauses(deadline):
                # An answer that is already on its way is worth waiting for a little.
                left_s = max(_LAST_ANSWER_S, max(deadline, patient_until) - time.monotonic())
                if stop_key is not None and self._has([stop_key], left_s):
                    found = values + self._present(keys[first:])
                    return Collected(found, self._values([stop_key], left_s)[0])
                if self._has(batch, left_s):
                    values += self._values(batch, left_s)
                    break
                self._pause(pause_s)
            else:
                return Collected(values + self._present(keys[first:]), None)
        return Collected(values, None)

    def _pauses(self, deadline: float) -> Iterator[float]:
        """Pauses between looks; the last look is made at the deadline."""
        pause_s = _FIRST_PAUSE_S
        while True:
            left_s = deadline - time.monotonic()
            yield max(0.0, min(pause_s, left_s))
            if left_s <= 0:
                return
            pause_s = min(pause_s * 1.5, self._max_pause_s)

    def _present(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.peek(key) for key in keys]

    def gather(self, key: str, data: bytes, timeout_s: float) -> list[bytes]:
        if self.rank != 0:
            self.publish(f"{key}/{self.rank}", data)
            return []
        keys = [f"{key}/{rank}" for rank in range(1, self.world_size)]
        values = [data, *self.collect(keys, timeout_s).values]
        self.forget(keys)
        missing = [rank for rank, value in enumerate(values) if value is None]
        if missing:
            raise GroupTimeout(
                f"{ranks_text(missing)} did not answer {key!r} within {timeout_s:g} s", missing
            )
        return [value for value in values if value is not None]

    def broadcast(self, key: str, data: bytes | None, timeout_s: float) -> bytes:
        if self.rank != 0:
            try:
                return self.fetch(key, timeout_s)
            except GroupTimeout as e:
                raise GroupTimeout(f"rank 0 did not answer: {e}", missing=(0,)) from e
        if data is None:
            raise ValueError(f"rank 0 must give the data of {key!r}")
        if self.world_size > 1:
            self.publish(key, data)
        return data

    def close(self) -> None:
        pass


def _part_keys(key: str, head: bytes) -> list[str]:
    if not head.startswith(_PARTS):
        return []
    return [f"{key}/part/{i}" for i in range(int(head[1:]))]


def ranks_text(ranks: Sequence[int], limit: int = 8) -> str:
    """``rank 3`` or ``ranks 1, 2, 5 and 40 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:limit])
    return f"ranks {shown}" + (f" and {len(ranks) - limit} more" if len(ranks) > limit else "")


# ---- threads of one process, and a job of one rank


class _Board:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.requests = 0  # what tests of linearity count


class ThreadGroup(_KeyValueGroup):
    """Ranks that are threads of one process."""

    def __init__(self, board: _Board, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.board = board

    @classmethod
    def make(cls, world_size: int) -> list[ThreadGroup]:
        board = _Board()
        return [cls(board, rank, world_size) for rank in range(world_size)]

    def clone(self) -> ThreadGroup:
        return ThreadGroup(self.board, self.rank, self.world_size)

    def _set(self, key: str, value: bytes, timeout_s: float) -> None:
        with self.board.changed:
            self.board.requests += 1
            self.board.values[key] = bytes(value)
            self.board.changed.notify_all()

    def _has(self, keys: Sequence[str], timeout_s: float) -> bool:
        with self.board.changed:
            self.board.requests += 1
            return all(key in self.board.values for key in keys)

    def _get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        with self.board.changed:
            self.board.requests += 1
            return [self.board.values[key] for key in keys]

    def _add(self, key: str, more: int, timeout_s: float) -> int:
        with self.board.changed:
            self.board.requests += 1
            value = int(self.board.values.get(key, b"0")) + more
            self.board.values[key] = b"%d" % value
            return value

    def _delete(self, key: str, timeout_s: float) -> None:
        with self.board.changed:
            self.board.requests += 1
            self.board.values.pop(key, None)

    def _pause(self, seconds: float) -> None:
        with self.board.changed:
            self.board.changed.wait(seconds)


class SoloGroup(ThreadGroup):
    """A job of one rank."""

    def __init__(self) -> None:
        super().__init__(_Board(), 0, 1)


# ---- ranks that are processes: torch.distributed's key-value store


class _Line:
    """The one thread that talks over a store's connection.

    A request to a TCPStore whose host hangs (stopped process, lost network) never returns. Made
    here, it can be given up; the thread, a daemon, is left behind.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="sharded_ckpt-store", daemon=True).start()

    def ask(self, call: Callable[[], T], timeout_s: float) -> T:
        """The result of ``call``. Raises ``TimeoutError`` when it has none in time."""
        request = _Request(call)
        self._requests.put(request)
        if not request.done.wait(timeout_s):
            request.abandoned = True
            raise TimeoutError
        if request.error is not None:
            raise request.error
        result: T = request.result
        return result

    def close(self) -> None:
        self._requests.put(None)

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            if request.abandoned:
                continue  # whoever asked has told its caller that it did not happen
            try:
                request.result = request.call()
            except Exception as e:
                request.error = e
            request.done.set()


class _Request:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None
        self.abandoned = False


class StoreGroup(_KeyValueGroup):
    """Ranks that share a ``torch.distributed`` store. All keys begin with ``prefix``."""

    def __init__(self, store: Any, rank: int, world_size: int, prefix: str) -> None:
        super().__init__(rank, world_size)
        self._store = store
        self._prefix = prefix
        self._line = _Line()

    def clone(self) -> StoreGroup:
        # Before torch 2.8 stores cannot be cloned. Sharing one is safe: no request blocks in it.
        clone = getattr(self._store, "clone", None)
        store = self._store if clone is None else self._ask("", clone, OP_TIMEOUT_S)
        return StoreGroup(store, self.rank, self.world_size, self._prefix)

    def close(self) -> None:
        self._line.close()

    def _set(self, key: str, value: bytes, timeout_s: float) -> None:
        self._ask(key, lambda: self._store.set(self._key(key), value), timeout_s)

    def _has(self, keys: Sequence[str], timeout_s: float) -> bool:
        full = [self._key(key) for key in keys]
        return bool(self._ask(keys[0], lambda: self._store.check(full), timeout_s))

    def _get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        full = [self._key(key) for key in keys]
        if len(full) == 1:
            return [self._ask(keys[0], lambda: self._store.get(full[0]), timeout_s)]
        return list(self._ask(keys[0], lambda: self._store.multi_get(full), timeout_s))

    def _add(self, key: str, more: int, timeout_s: float) -> int:
        return int(self._ask(key, lambda: self._store.add(self._key(key), more), timeout_s))

    def _delete(self, key: str, timeout_s: float) -> None:
        self._ask(key, lambda: self._store.delete_key(self._key(key)), timeout_s)

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _ask(self, key: str, call: Callable[[], T], timeout_s: float) -> T:
        where = f"rank {self.rank}: the coordinator (rank 0) cannot be reached"
        try:
            return self._line.ask(call, timeout_s)
        except TimeoutError:
            raise GroupTimeout(
                f"{where}: the job's key-value store gave no answer for {key!r} within "
                f"{timeout_s:g} s; the process that hosts it is stopped, or the network is down",
                missing=(0,),
            ) from None
        except RuntimeError as e:  # torch's DistStoreError and DistNetworkError are such
            reason = str(e).strip().partition("\n")[0]
            raise GroupError(
                f"{where}: the job's key-value store failed at {key!r} ({reason}); rank 0, or the "
                "launcher that hosts the store, has probably ended"
            ) from e


_instances: defaultdict[str, int] = defaultdict(int)


def group_from_torch(instance: str, timeout_s: float = OP_TIMEOUT_S) -> Group:
    """The group of the running job; a :class:`SoloGroup` when it has one process.

    Every rank must call this equally often with the same ``instance``, as with process groups.
    Raises :class:`GroupTimeout` on ranks that do not hear from rank 0 within ``timeout_s``, and on
    rank 0 when it does not hear from all others.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return SoloGroup()
    from torch.distributed.distributed_c10d import _get_default_store

    rank, world_size = dist.get_rank(), dist.get_world_size()
    # The store may outlive the processes (a launcher that hosts it restarts them) and the
    # checkpointer (a second one in the same process), so old keys may be in it.
    _instances[instance] += 1
    meeting = _meeting(instance, _instances[instance], world_size)
    base = StoreGroup(_get_default_store(), rank, world_size, meeting)
    lobby = base.clone()
    base.close()
    nonce = secrets.token_hex(8) if rank == 0 else ""
    nonce = lobby.broadcast("nonce", nonce.encode() or None, timeout_s).decode()
    group = StoreGroup(lobby._store, rank, world_size, f"{meeting}/{nonce}")
    try:
        group.gather("joined", b"", timeout_s)
    except BaseException:
        group.close()
        raise
    finally:
        # Workers that start again after a change of members may meet under the same name: what
        # they find there must be from their own rank 0.
        if rank == 0:
            with contextlib.suppress(GroupError):
                lobby.forget(["nonce"])
        lobby.close()
    return group


def _meeting(instance: str, count: int, world_size: int) -> str:
    """Where the ranks of one start of a job meet: the same on all, another after most restarts."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    hosts = os.environ.get("GROUP_WORLD_SIZE", "0")
    return f"sharded_ckpt/{instance}/{restart}.{count}.{world_size}.{hosts}"
