"""Commands about sets as a whole: ls, info, verify, gc, pin, unpin."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

from sharded_ckpt import dtypes, layout, reader, retention
from sharded_ckpt.cli_output import human, progress, say, say_json, table, warn
from sharded_ckpt.cli_target import FoundSet, find_set, find_sets, open_store
from sharded_ckpt.errors import CheckpointError, StepNotFound
from sharded_ckpt.layout import SetId
from sharded_ckpt.manifest import Manifest
from sharded_ckpt.reader_verify import Damage, verify_set
from sharded_ckpt.slices import Entry
from sharded_ckpt.store import LocalStore

GOOD, BAD = 0, 1


def ls(args: argparse.Namespace) -> int:
    """Committed steps, oldest first in the order in which a load ranks them."""
    try:
        found = find_sets(args.path, None)
    except StepNotFound as error:
        if args.json:
            say_json({"steps": [], "damaged": []})
        warn(str(error))
        return BAD
    sound = [one for one in found if isinstance(one.manifest, Manifest)]
    sound.sort(key=lambda one: (one.sound().rank_key, one.sound().content == "full"))
    damaged = [one for one in found if not isinstance(one.manifest, Manifest)]
    steps = [_summary(one) for one in sound]
    if args.json:
        broken = [{"path": one.path, "message": str(one.manifest)} for one in damaged]
        say_json({"steps": steps, "damaged": broken})
    elif steps:
        head = ["step", "term", "serial", "content", "size", "ranks", "pinned", "metrics", "path"]
        rows = [head]
        for step in steps:
            metrics = " ".join(f"{name}={value:g}" for name, value in step["metrics"].items())
            cells = [str(step[key]) for key in ("step", "term", "serial", "content")]
            cells += [human(step["nbytes"]), str(step["ranks"]), "yes" if step["pinned"] else ""]
            rows.append([*cells, metrics, step["path"]])
        for line in table(rows):
            say(line)
    for one in damaged:
        warn(f"damaged: {one.manifest}")
    return BAD if damaged else GOOD


def info(args: argparse.Namespace) -> int:
    """One set: its manifest in short, and its tensors with who holds what."""
    found = find_set(args.path, args.step)
    manifest = found.sound()
    shards = found.reader()
    entries = shards.entries()
    pieces = {name: len(held) for name, held in shards.holdings().items()}
    summary = {
        **_summary(found),
        "run_id": manifest.run_id,
        "created_at": manifest.created_at,
        "origin": manifest.origin.dirname if manifest.origin else None,
        "layout": manifest.layout,
        "versions": manifest.versions,
        "aliases": manifest.aliases,
        "kinds": _kinds(entries),
        "shards": [
            {
                "rank": ref.rank,
                "file": ref.file,
                "nbytes": ref.nbytes,
                "tensors": len(shards.header(ref.rank).entries),
            }
            for ref in manifest.shards
        ],
    }
    tensors = [
        {
            "name": name,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "pieces": pieces[name],
            "copy": entry.copy,
            "model_dtype": entry.model_dtype,
        }
        for name, entry in sorted(entries.items())
    ]
    if args.json:
        say_json({**summary, **({"tensors": tensors} if args.tensors else {})})
        return GOOD
    for key in ("path", "step", "term", "serial", "content", "origin", "run_id", "created_at"):
        say(f"{key:<12}{summary[key]}")
    say(f"{'size':<12}{human(manifest.nbytes)} in {len(manifest.shards)} files")
    for key in ("ranks", "pinned", "metrics", "layout", "aliases", "versions"):
        say(f"{key:<12}{summary[key]}")
    for kind, (count, nbytes) in _kinds(entries).items():
        say(f"{kind + '/':<12}{count} tensors, {human(nbytes)}")
    for item in summary["shards"]:
        say(
            f"{item['file']}  rank {item['rank']}: {item['tensors']} tensors, "
            f"{human(item['nbytes'])}"
        )
    if args.tensors:
        head = ["name", "dtype", "shape", "pieces"]
        rows = [[str(tensor[key]) for key in head] for tensor in tensors]
        for line in table([head, *rows]):
            say(line)
    return GOOD


def verify(args: argparse.Namespace) -> int:
    """Reads every byte of the sets named and reports every damaged region."""
    sets = find_sets(args.path, args.step)
    total = sum(one.manifest.nbytes for one in sets if isinstance(one.manifest, Manifest))
    results: list[dict[str, Any]] = []
    with progress(total, "verify") as done:
        for one in sets:
            if isinstance(one.manifest, Manifest):
                damage = verify_set(
                    one.store, one.engine, one.manifest, directory=one.directory, progress=done
                )
            else:
                damage = [Damage(f"{one.path}/{layout.MANIFEST}", str(one.manifest))]
            step = one.id.step if one.id is not None else None
            results.append({"step": step, "path": one.path, "damage": damage})
    bad = [result for result in results if result["damage"]]
    if args.json:
        sets_json = [
            {
                "step": result["step"],
                "path": result["path"],
                "ok": not result["damage"],
                "damage": [_damage_json(damage) for damage in result["damage"]],
            }
            for result in results
        ]
        say_json({"ok": not bad, "sets": sets_json})
    else:
        for result in results:
            state = "DAMAGED" if result["damage"] else "ok"
            say(f"{state:<8} step {result['step']}  {result['path']}")
            for damage in result["damage"]:
                say(f"         {_damage_text(damage)}")
    return BAD if bad else GOOD


def gc(args: argparse.Namespace) -> int:
    """What jobs left behind without committing it; removed with ``--yes`` only."""
    store = open_store(args.path)
    orphans = list(_orphans(store))
    highest = _highest_term(store)
    below = highest + 1 if args.force_term else highest
    may_go = [orphan for orphan in orphans if orphan["term"] < below]
    stay = [orphan for orphan in orphans if orphan["term"] >= below]
    removed: list[str] = []
    if args.yes and may_go:
        ids = set(retention.gc_orphans(store, below))
        removed = [
            orphan["path"]
            for orphan in may_go
            if SetId.parse(orphan["name"]) in ids or layout.parse_trash_name(orphan["name"]) in ids
        ]
    if args.json:
        say_json({"dry_run": not args.yes, "orphans": may_go, "kept": stay, "removed": removed})
        return GOOD
    for orphan in may_go:
        verb = "removed" if orphan["path"] in removed else "kept" if args.yes else "would remove"
        say(f"{verb}: {orphan['path']} ({human(orphan['nbytes'])}): {orphan['why']}")
    for orphan in stay:
        say(
            f"kept: {orphan['path']}: it is of the newest term {highest}, whose job may still be "
            "writing it; with no job running, --force-term includes it"
        )
    if not orphans:
        say(f"nothing to remove in {store.path()}")
    elif not args.yes and may_go:
        say("nothing was removed; run again with --yes to remove these")
    return GOOD


def pin(args: argparse.Namespace) -> int:
    """Keeps a step whatever the retention policy says: the set of it that a load would take."""
    store = open_store(args.path)
    id, _ = reader.find(store, args.step)
    retention.pin(store, id, args.note)
    return _say_pinned(args, store, [id], pinned=True)


def unpin(args: argparse.Namespace) -> int:
    """Gives a step back to the retention policy: every set of it, whichever of them was pinned."""
    store = open_store(args.path)
    ids = [id for id, _ in reader.candidates(store, args.step)]
    if not ids:
        reader.find(store, args.step)  # raises, and names the steps that there are
    pinned = [id for id in ids if store.exists(f"{id.dirname}/{layout.PIN}")]
    for id in pinned:
        retention.unpin(store, id)
    return _say_pinned(args, store, pinned or ids[:1], pinned=False)


def _say_pinned(
    args: argparse.Namespace, store: LocalStore, ids: list[SetId], *, pinned: bool
) -> int:
    paths = [store.path(id.dirname) for id in ids]
    if args.json:
        say_json({"step": args.step, "path": paths[0], "paths": paths, "pinned": pinned})
        return GOOD
    for path in paths:
        say(f"{'pinned' if pinned else 'unpinned'} step {args.step}: {path}")
    return GOOD


def _summary(found: FoundSet) -> dict[str, Any]:
    manifest = found.sound()
    pin_name = f"{found.directory}/{layout.PIN}" if found.directory else layout.PIN
    return {
        "step": manifest.id.step,
        "term": manifest.id.term,
        "serial": manifest.id.serial,
        "path": found.path,
        "nbytes": manifest.nbytes,
        "ranks": manifest.world_size,
        "metrics": manifest.metrics,
        "pinned": found.store.exists(pin_name),
        "content": manifest.content,
    }


def _kinds(entries: dict[str, Entry]) -> dict[str, tuple[int, int]]:
    """For each kind of tensor: how many, and their bytes when whole."""
    kinds: dict[str, tuple[int, int]] = {}
    for name, entry in sorted(entries.items()):
        count, nbytes = kinds.get(kind := name.split("/", 1)[0], (0, 0))
        size = math.prod(entry.shape) * dtypes.by_name(entry.dtype).itemsize
        kinds[kind] = (count + 1, nbytes + size)
    return kinds


def _orphans(store: LocalStore) -> Iterator[dict[str, Any]]:
    for name in store.list_dir():
        trashed = layout.parse_trash_name(name)
        id = trashed or SetId.parse(name)
        if id is None or store.kind(name) != "dir":
            continue
        names = store.list_dir(name)
        if layout.MANIFEST in names:
            continue
        why = f"step {id.step} was never committed: it has no {layout.MANIFEST}"
        if trashed is not None:
            why = f"step {id.step} was being removed when its job ended"
        yield {
            "name": name,
            "path": store.path(name),
            "step": id.step,
            "term": id.term,
            "nbytes": sum(_size(store, f"{name}/{inner}") for inner in names),
            "why": why,
        }


def _size(store: LocalStore, name: str) -> int:
    try:
        return store.size(name)
    except CheckpointError:
        return 0  # gone meanwhile, or not a file: it does not count


def _highest_term(store: LocalStore) -> int:
    names = store.list_dir()
    terms = [term for term in map(layout.parse_term_file, names) if term is not None]
    terms += [id.term for id in map(SetId.parse, names) if id is not None]
    return max(terms, default=0)


def _damage_json(damage: Damage) -> dict[str, Any]:
    return {
        "file": damage.file,
        "message": damage.message,
        "tensors": list(damage.tensors),
        "start": damage.start,
        "end": damage.end,
    }


def _damage_text(damage: Damage) -> str:
    where = damage.file if damage.file not in damage.message else ""
    if damage.start is not None and damage.end is not None:
        where += f" bytes {damage.start} to {damage.end}"
    names = ", ".join(damage.tensors[:8])
    more = f" and {len(damage.tensors) - 8} more" if len(damage.tensors) > 8 else ""
    tensors = f" ({names}{more})" if names else ""
    return f"{where}: {damage.message}{tensors}" if where else damage.message + tensors
