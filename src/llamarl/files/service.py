"""The host's end: answers a controller that has proved the key, one question after another.

    share    does this host see the controller's run folder?       open, forget, leave   a run folder of the host's own
    list     what lies in it                                       get, put       a file out of it, into it
    remove   a file or folder of it                                same, holds, lacks   which content is here already
    keep     a file by its content                                 place          a folder of contents under their names
    keeps    does this host have the run's folder still?           stand_by       go on with the run if its controller is gone

``get`` answers with the size and then sends the rest of the file from the offset asked for; ``put`` and ``keep`` answer with the
offset from which they lack it. The disk is touched on threads: the loop that calls this has other work.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import xxhash

from llamarl.checkpoint.shared_folder import FolderQuestion
from llamarl.errors import LlamaRLError, TransferError
from llamarl.files.frames import StreamFrames
from llamarl.files.host_files import HostFiles, StandBy, records_from
from llamarl.files.partial import CHUNK_BYTES, Partial

__all__ = ["STALL_S", "serve_files"]

STALL_S = 60.0
"""Longest time without a byte while a file or an answer is under way."""


async def serve_files(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    files: HostFiles,
    *,
    stall_s: float = STALL_S,
    used: set[str] | None = None,
) -> None:
    """Answer until the controller hangs up. The connection has proved the run's key before.

    Args:
        used: Gets the runs that were asked for.

    Raises:
        OSError: The connection broke, or stood still in the middle of something (TimeoutError).
        EOFError: It ended there.
    """
    frames = StreamFrames(reader, writer, stall_s)
    while (question := await frames.question()) is not None:
        try:
            answer = await _answer(frames, files, question)
            if used is not None and (run := (answer or {}).get("run") or question.get("run")):
                used.add(str(run))
        except _Told as told:
            answer = _told(told)
        except TransferError as error:
            answer = {"error": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            answer = {"error": f"a question that this host does not understand: {error!r}"}
        if answer is not None:
            await frames.say(answer)


class _Told(Exception):
    """What went wrong here and not on the connection: the controller is told."""


def _told(told: _Told) -> dict[str, Any]:
    error = told.__cause__
    return {"error": str(error), "missing": isinstance(error, TransferError) and error.missing}


async def _here(work: Callable[[], Any]) -> Any:
    """Do something on the disk, on a thread."""
    try:
        return await asyncio.to_thread(work)
    except FileNotFoundError as error:
        raise _Told from TransferError(f"{error.filename} is not there", missing=True)
    except LlamaRLError as error:
        raise _Told from error
    except OSError as error:
        raise _Told from TransferError(f"{error.filename or 'the disk'}: {error.strerror or error}")


async def _answer(frames: StreamFrames, files: HostFiles, asked: dict[str, Any]) -> dict[str, Any] | None:
    match asked.get("do"):
        case "share":
            question = FolderQuestion(folder=str(asked["folder"]), name=str(asked["name"]))
            found = await _here(lambda: files.share(question, str(asked["host"])))
            return {"read": found.read, "wrote": found.wrote, "trouble": found.trouble}
        case "open":
            handle, folder = await _here(lambda: files.open_run(str(asked["run_id"])))
            return {"run": handle, "folder": str(folder)}
        case "forget":
            await _here(lambda: files.forget(str(asked["run"])))
            return {}
        case "keeps":
            return {"keeps": await _here(lambda: files.keeps(str(asked["run"])))}
        case "stand_by":
            words, after_s = [str(word) for word in asked["words"]], float(asked["after_s"])
            await _here(lambda: files.stand_by(str(asked["run"]), StandBy(words=tuple(words), after_s=after_s)))
            return {}
        case "leave":
            await _here(lambda: files.leave(str(asked["run"])))
            return {}
        case "list":
            run = await _here(lambda: files.run(str(asked["run"])))
            return {"files": await _here(lambda: list(run.walk([str(name) for name in asked["skip"]])))}
        case "remove":
            run = await _here(lambda: files.run(str(asked["run"])))
            await _here(lambda: run.remove(str(asked["path"])))
            return {}
        case "get":
            return await _get(frames, files, str(asked["run"]), str(asked["path"]), int(asked["offset"]))
        case "put" | "keep":
            return await _put(frames, files, asked)
        case "holds":
            records = records_from(asked["files"])
            return {"holds": await _here(lambda: files.holds(str(asked["path"]), records))}
        case "same":
            seen = [(str(name), int(num_bytes), int(mtime_ns)) for name, num_bytes, mtime_ns in asked["files"]]
            return {"same": await _here(lambda: files.same(str(asked["path"]), seen))}
        case "lacks":
            records = records_from(asked["files"])
            return {"lacks": await _here(lambda: files.lacks(records))}
        case "place":
            records = records_from(asked["files"])
            return {"folder": str(await _here(lambda: files.place(str(asked["run"]), records)))}
        case other:
            raise ValueError(f"{other!r:.50}")


async def _get(frames: StreamFrames, files: HostFiles, run: str, path: str, offset: int) -> dict[str, Any]:
    below = await _here(lambda: files.run(run))
    descriptor = await _here(lambda: below.open(path))
    try:
        num_bytes = os.fstat(descriptor).st_size
        digest = xxhash.xxh3_128()

        def read(most: int) -> bytes:
            data = os.read(descriptor, most)
            digest.update(data)
            return data

        position = 0
        while position < min(offset, num_bytes):  # the checksum is of the whole file
            position += len(await _here(partial(read, min(CHUNK_BYTES, min(offset, num_bytes) - position))))
        await frames.say({"bytes": num_bytes, "offset": position})
        trouble = ""
        try:
            while position < num_bytes and (data := await _here(partial(read, min(CHUNK_BYTES, num_bytes - position)))):
                await frames.send(data)
                position += len(data)
        except _Told as error:
            trouble = str(error.__cause__)
        await frames.send(b"")
        return {"error": trouble} if trouble else {"bytes": position, "xxh3_128": digest.hexdigest()}
    finally:
        os.close(descriptor)


async def _put(frames: StreamFrames, files: HostFiles, asked: dict[str, Any]) -> dict[str, Any]:
    (record,) = records_from([asked["file"]])
    run = await _here(lambda: files.run(str(asked["run"]))) if asked["do"] == "put" else None
    coming: Partial = await _here(lambda: files.partial(record))
    with coming:
        await frames.say({"offset": coming.offset})
        trouble: _Told | None = None
        while data := await frames.data():  # to its end, also after an error: the controller reads no answer before
            if trouble is None:
                try:
                    await _here(partial(coming.write, data))
                except _Told as error:
                    trouble = error
        if trouble is not None:
            raise trouble
        place, _ = await _here(coming.finish)
        if run is None:
            await _here(lambda: files.keep(place, record))
        else:
            await _here(lambda: run.put(place, record.path))
    return {}
