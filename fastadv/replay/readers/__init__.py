"""Readers of logged rollouts. Each turns one file into Rollouts; nothing in a file is executed."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path

from fastadv.replay.errors import ReplayError
from fastadv.replay.readers import miles, portable, verl
from fastadv.replay.readers.rollouts import ReadOptions, Rollouts

__all__ = ["ReadOptions", "Rollouts", "find", "read"]

SUFFIXES = (".pt", ".jsonl", ".safetensors")
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_LEGACY_TORCH = b"\x80"  # a pickle without the zip archive around it, as torch.save once wrote
_READERS: dict[str, Callable[[Path, ReadOptions], Rollouts]] = {
    "torch": miles.read,
    "safetensors": portable.read,
    "jsonl": verl.read,
}


def find(paths: list[Path]) -> list[Path]:
    """The files that these paths name, each once; a folder names the dumps in it, in order of their names.

    Raises:
        ReplayError: a path that does not exist, a folder without a dump.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            try:
                inside = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES and p.is_file())
            except OSError as error:
                raise ReplayError(f"{path} cannot be listed: {error.strerror}") from error
            if not inside:
                raise ReplayError(f"{path} is a folder without dumps ({', '.join(SUFFIXES)})")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise ReplayError(f"{path} does not exist")
    once: dict[Path, Path] = {}
    for path in found:
        once.setdefault(path.resolve(), path)
    return list(once.values())


def kind_of(path: Path) -> str:
    """The kind of a file by its first bytes: "torch", "safetensors" or "jsonl".

    Raises:
        ReplayError: a file that is none of these, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise ReplayError(f"{path} cannot be read: {error.strerror}") from error
    if not head:
        raise ReplayError(f"{path} is empty")
    # Before torch: the first byte is of the header's length, and may be the one that a pickle begins with.
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**40:
        return "safetensors"
    if head.startswith((b"PK\x03\x04", _LEGACY_TORCH)):
        return "torch"
    if head.startswith(_UTF16):
        raise ReplayError(f"{path} is UTF-16 text; verl's log is UTF-8 (iconv -f UTF-16 -t UTF-8 converts it)")
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith(b"{") or not text:
        return "jsonl"
    if text.startswith(b"["):
        raise ReplayError(f"{path} is a JSON array; verl's log has one object a line (jq -c '.[]' makes one of it)")
    raise ReplayError(
        f"{path} is no dump that can be read: neither a torch file (Miles, slime), nor JSON lines (verl), nor the "
        "portable format (safetensors)"
    )


def read(path: Path, options: ReadOptions) -> Rollouts:
    """Reads one dump.

    Raises:
        ReplayError: a file that cannot be read, is incomplete or contradicts itself, with what and where.
    """
    return _READERS[kind_of(path)](path, options)
