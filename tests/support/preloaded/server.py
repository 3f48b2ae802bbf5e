"""A process that has imported what programs of the tests import, and forks one for every client that connects."""

from __future__ import annotations

import array
import atexit
import fcntl
import functools
import gc
import importlib
import multiprocessing
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import types
from dataclasses import dataclass
from pathlib import Path

IMPORTED = (
    "accelerate.commands.launch",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "hydra",
    "lightning.pytorch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "transformers.integrations.deepspeed",
)
"""Packages of others: what a program imports of this one, and when, stays as it is."""


@dataclass(frozen=True)
class Request:
    """A command line of ``python`` and what belongs to its process."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    files: dict[int, int]
    """Descriptor in the client -> the same file here."""


def receive(connection: socket.socket) -> Request:
    """Return the request of a client."""
    received = array.array("i")
    size, ancillary, *_ = connection.recvmsg(8, socket.CMSG_SPACE(256 * received.itemsize))
    for *_, data in ancillary:
        received.frombytes(data[: len(data) - len(data) % received.itemsize])
    message = b""
    while len(message) < int.from_bytes(size, "big"):
        message += connection.recv(2**16)
    count, *parts = message.decode(errors="surrogateescape").split("\0")
    arguments, (folder, files, *variables) = parts[: int(count)], parts[int(count) :]
    environment = dict(variable.split("=", 1) for variable in variables)
    return Request(arguments, folder, environment, dict(zip(map(int, files.split()), received, strict=True)))


class Server:
    """Accepts clients until standard input ends.

    Args:
        path: of the socket to listen on.
    """

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)
        self._clients: dict[int, socket.socket] = {}
        """Process of a program -> its client."""

    def serve(self) -> Request | None:
        """Return in every program's process, with its request, and at last in this one."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == 0:
                    return self._end()
                if key.fileobj is self._listener:
                    request = self._fork()
                    if request is not None:
                        return request
                elif isinstance(key.fileobj, int):
                    self._report(key.fileobj, key.data)
                else:
                    self._forward(key.data)

    def _fork(self) -> Request | None:
        """Start a program; return its request in its process only."""
        client, _ = self._listener.accept()
        request = receive(client)
        process = os.fork()
        os.setpgid(process, process)  # in both: whichever comes first
        if process == 0:
            for each in (self._listener, client, *self._clients.values()):
                each.close()
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, int) and key.fileobj != 0:
                    os.close(key.fileobj)
            self._selector.close()
            return request
        for file in request.files.values():
            os.close(file)
        self._clients[process] = client
        self._selector.register(client, selectors.EVENT_READ, process)
        self._selector.register(os.pidfd_open(process), selectors.EVENT_READ, process)
        return None

    def _forward(self, process: int) -> None:
        """Pass a signal on; end the program, and what it has started, with its client."""
        client = self._clients[process]
        try:
            number = client.recv(1)
        except ConnectionResetError:
            number = b""
        if number:
            os.kill(process, number[0])
        else:
            self._selector.unregister(client)
            os.killpg(process, signal.SIGKILL)

    def _report(self, ended: int, process: int) -> None:
        """Tell a client how its program has ended."""
        self._selector.unregister(ended)
        os.close(ended)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        client = self._clients.pop(process)
        if client in {key.fileobj for key in self._selector.get_map().values()}:
            self._selector.unregister(client)
            client.send(str(exit_code).encode())
        client.close()

    def _end(self) -> None:
        for process in self._clients:
            os.killpg(process, signal.SIGKILL)


def become(request: Request, executable: str, installed: list[str]) -> None:
    """Give this process the files, folder, environment and ``sys`` of the program.

    Args:
        request: of the client.
        executable: starts further programs in the same way.
        installed: the part of ``sys.path`` that no environment variable gives.
    """
    # Out of the way first: a file may have here the number that another one has in the client.
    moved = {wanted: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 512) for wanted, file in request.files.items()}
    for file in request.files.values():
        os.close(file)
    for wanted, file in moved.items():
        os.dup2(file, wanted)
        os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    random.seed()
    sys.executable = executable
    multiprocessing.set_executable(executable)
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *installed]


def run(arguments: list[str]) -> None:
    """Run a module, a piece of code or a script as ``__main__``, as ``python`` would."""
    while arguments[0] in ("-u", "-B"):
        arguments = arguments[1:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
        main.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), vars(main))


def remember_machine() -> None:
    """Let DeepSpeed ask for processor and cores once; every CPU Adam starts a program that runs for a second."""
    import cpuinfo
    from deepspeed.utils import numa

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    numa.get_numa_cores = functools.cache(numa.get_numa_cores)


def main(path: str, executable: str) -> None:
    """Import, listen on the socket ``path``, and become the programs that clients ask for."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [place for place in sys.path[1:] if place not in given]
    for name in IMPORTED:
        importlib.import_module(name)
    remember_machine()
    importlib.import_module("cpuinfo").get_cpu_info()
    gc.collect()
    gc.freeze()
    request = Server(path).serve()
    if request is not None:
        become(request, executable, installed)
        if "triton" in sys.modules:
            # Its binding library tells on standard error which of its objects are left: all that are never collected.
            atexit.register(gc.unfreeze)
        run(request.arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
