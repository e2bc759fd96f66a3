"""Records as lines of JSON: appended whole, read with every field checked."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import math
import os
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch

from fastadv.record import SCHEMA, StepRecord, built, hints

RANK = "{rank}"
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # a file system that has none


class RecordError(ValueError):
    """A file of records that cannot be used, with its name, the line and the field."""


def to_line(record: StepRecord) -> str:
    """A record as one line of JSON, without its line end; what does not exist is null."""
    values = dataclasses.asdict(record)
    return json.dumps({"schema": SCHEMA, **values.pop("extra"), **values}, allow_nan=False)


def from_line(line: str) -> StepRecord:
    """The record of a line; keys that are no field are its `extra`.

    Raises:
        ValueError: a line that is not JSON, another schema, a field that is missing or of another type.
    """
    try:
        values = json.loads(line, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError(f"is a {type(values).__name__}; a record is an object")
    if "schema" not in values:
        raise ValueError("field 'schema' is missing")
    schema = values.pop("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise ValueError(f"field 'schema' is {schema!r:.100}; this version of fastadv reads {SCHEMA}")
    fields = {name: values.pop(name) for name in hints(StepRecord) if name in values and name != "extra"}
    return built(StepRecord, {**fields, "extra": values}, "")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no finite number; write null")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)  # 1e999


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {twice!r} is there twice")
    return found


class RecordWriter:
    """Appends a line a step.

    Of several processes of `torch.distributed`, rank 0 writes and the others do nothing; with "{rank}" in the path,
    every rank writes a file of its own. A line reaches the system in one piece, before `write` returns. What a crash
    left of a line at the end of the file is cut off, with a warning.

    Args:
        path: file; made if it is not there, in a folder that is.

    Raises:
        RecordError: another process writes to the file.
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        there = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if there else 0
        self.path = Path(str(path).replace(RANK, str(rank)))
        self.closed = False
        self._file: int | None = None  # of ranks that do not write
        if rank and RANK not in str(path):
            return
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            _lock(self._file, self.path)
            _mend(self._file, self.path)
        except BaseException:
            self.close()
            raise

    def write(self, record: StepRecord) -> None:
        """Appends a record.

        Raises:
            ValueError: the writer was closed.
            OSError: the system could not take the whole line; what it took is cut off again.
        """
        if self.closed:
            raise ValueError(f"RecordWriter: {self.path} was closed")
        if self._file is None:
            return
        line = to_line(record).encode() + b"\n"
        before = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            os.ftruncate(self._file, before)
            raise

    def close(self) -> None:
        """Closes the file; another process may then write to it."""
        if self._file is not None:
            os.close(self._file)
        self._file, self.closed = None, True

    def __del__(self) -> None:  # a writer that nobody has any more would hold the file's lock
        if getattr(self, "_file", None) is not None:
            self.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock(file: int, path: Path) -> None:
    """Takes the file for this process, where the file system has locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RecordError(
            f"{path} is being written by another writer: write from one process, or put {RANK} into the path"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _mend(file: int, path: Path) -> None:
    """Ends the file with a whole line: a line without its end is given it, or cut off if a crash tore it."""
    with os.fdopen(os.dup(file), "rb") as reader:
        reader.seek(0)
        text = reader.read()
    torn = text[text.rfind(b"\n") + 1 :]
    if not torn:
        return
    if _whole(torn):
        os.write(file, b"\n")
        return
    warnings.warn(f"{path}: its last line was torn and is cut off: {torn[:60]!r}", stacklevel=3)
    os.ftruncate(file, len(text) - len(torn))


def _whole(line: bytes) -> bool:
    """Whether a line without its end is JSON all the same: then nothing of it is lost."""
    try:
        json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False
    except ValueError:  # an integer with more digits than Python reads: the reader says so
        return True
    except RecursionError:  # a line without its end may still be whole: the reader says what is wrong with it
        return line.rstrip().endswith(b"}")
    return True


def read_records(path: str | Path) -> list[StepRecord]:
    """Reads a file of records, in the order in which they were written.

    A line that a crash tore, at the end of the file, is left out with a warning.

    Args:
        path: JSON lines, as RecordWriter writes them.

    Returns:
        The records.

    Raises:
        RecordError: a line that is no record, with the file, the line and the field.
        OSError: a file that cannot be read.
    """
    text = Path(path).read_bytes()
    lines = text.split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if number == len(lines) and not _whole(line):
            warnings.warn(f"{path}, line {number}: was torn and is left out: {line[:60]!r}", stacklevel=2)
            break
        try:
            records.append(from_line(line.decode()))
        except ValueError as error:
            raise RecordError(f"{path}, line {number}: {_short(str(error))}") from error
    return records


def _short(message: str) -> str:
    """A message without the middle of the names that a hostile line may have in it."""
    return message if len(message) <= 400 else f"{message[:200]}…{message[-150:]}"


def last_of_each_step(records: list[StepRecord]) -> list[StepRecord]:
    """Records by step, of a step that was repeated after a restart the last one."""
    return [record for _, record in sorted({record.step: record for record in records}.items())]
