"""`python -m deepinfer_workers FD PARENT_PID`: one worker process, started by an engine's supervisor.

FD is a socket pair's end. It brings one configuration message, and its end of file says that the engine is gone.
A worker dies with its parent in every way that a parent can die: by that end of file, and, where the kernel offers
it, by a signal that the kernel sends even to a process that is stuck in a call.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
from typing import Any

from deepinfer_protocol import ProtocolError, WorkerConfig, config_length, decode_config
from deepinfer_workers.runner import Runner, WorkerFault
from deepinfer_workers.worker import Worker

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Exit codes: 0 told to stop, 1 fault, 2 wrong arguments."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m deepinfer_workers FD PARENT_PID (an engine starts this)\n")
        return 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine: it decides what happens to its workers
    pipe = socket.socket(fileno=int(arguments[0]))
    _die_with(int(arguments[1]))
    config = decode_config(_read(pipe, config_length(_read(pipe, 4))))
    threading.Thread(target=_exit_at_end_of_file, args=(pipe,), name="death-pipe", daemon=True).start()
    worker = Worker(config)
    try:
        worker.serve(_make_runner(config))
    except WorkerFault as fault:
        worker.fault(fault.code, str(fault))
        return 1
    except ProtocolError as error:
        worker.fault("protocol", str(error))
        return 1
    except Exception as error:
        worker.fault("internal", f"{type(error).__name__}: {error}")
        raise
    finally:
        worker.close()
    return 0


def _make_runner(config: WorkerConfig) -> Runner[Any]:
    if config.runner == "fake":
        from deepinfer_workers.fake import FakeRunner

        return FakeRunner(config)
    try:
        from deepinfer_workers.model_runner import ModelRunner
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "gguf", "numpy"):
            raise
        raise WorkerFault(
            "unsupported_model", f"{error.name} is not installed: pip install 'deepinfer-runtime[worker]'"
        ) from None
    runner = ModelRunner(config)
    gc.freeze()  # what the imports left behind is not looked at again
    return runner


def _die_with(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends; and check that it has not ended before."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def _exit_at_end_of_file(pipe: socket.socket) -> None:
    try:
        while pipe.recv(1):
            pass
    except OSError:
        pass
    os._exit(0)


def _read(pipe: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = pipe.recv(num_bytes - len(data))
        if not part:
            raise ProtocolError("the configuration ended early")
        data += part
    return data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
