"""Hand a command line of ``python`` to the server, and live and end as the program does. Imports next to nothing."""

import array
import os
import signal
import socket
import sys
import time

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def can_be_preloaded(arguments: "list[str]") -> bool:
    """Return true for a module, a piece of code or a script in a file, without options that change the interpreter."""
    while arguments[:1] in (["-u"], ["-B"]):
        arguments = arguments[1:]
    return len(arguments) > 0 and (arguments[0] in ("-m", "-c") or arguments[0].endswith(".py"))


def connect(path: str, seconds: float = 120.0) -> socket.socket:
    """Connect; the server may still import."""
    deadline = time.monotonic() + seconds
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def open_files() -> "list[int]":
    """Return the descriptors that this process was given."""
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")]


def main(path: str, *arguments: str) -> None:
    files = open_files()
    connection = connect(path)
    environment = [f"{name}={value}" for name, value in os.environ.items()]
    parts = [str(len(arguments)), *arguments, os.getcwd(), " ".join(map(str, files)), *environment]
    request = "\0".join(parts).encode(errors="surrogateescape")
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
    connection.sendmsg([len(request).to_bytes(8, "big")], [rights])
    connection.sendall(request)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    end_as(int(connection.recv(16).decode() or -signal.SIGKILL))


def end_as(exit_code: int) -> None:
    """End with the exit code, or by the signal that it stands for."""
    if exit_code < 0:
        signal.signal(-exit_code, signal.SIG_DFL) if -exit_code != signal.SIGKILL else None
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)


if __name__ == "__main__":
    if can_be_preloaded(sys.argv[2:]):
        main(*sys.argv[1:])
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
