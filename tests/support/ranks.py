"""Data-parallel ranks for tests: worker processes that stay alive and run one function after another together.

A function runs on every rank and must be importable (module level). The results come back in rank order. An exception
on any rank raises here with that rank's traceback; a rank that dies or is not done in time fails the call, and the
whole group is killed so that nothing hangs. Ranks use CUDA with NCCL where there are enough devices, else CPU with
gloo.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from support.preloaded.server import remember_machine


class RankError(AssertionError):
    """A rank raised, died, or did not finish in time.

    Args:
        text: with the ranks' tracebacks.
        errors: of the ranks that raised, without tracebacks.
    """

    def __init__(self, text: str, errors: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.errors = errors


class Failure(NamedTuple):
    """An exception on a rank."""

    traceback: str
    error: str
    """Kind and text of the exception alone."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls("".join(traceback.format_exception(error)), "".join(traceback.format_exception_only(error)))


class RankGroup:
    """``world_size`` worker processes joined in one process group.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 240.0, **kwargs: Any) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank; one result per rank."""
        if not self._workers:
            self._start()
        try:
            self._send((function, args, kwargs))
            results = self._collect(time.monotonic() + timeout, function.__name__, timeout)
        except RankError:
            self.stop()
            raise
        assert len(results) == self.world_size
        return [results[rank] for rank in range(self.world_size)]

    def _send(self, call: Any) -> None:
        for rank, (_, pipe) in enumerate(self._workers):
            try:
                pipe.send(call)
            except OSError:
                raise RankError(
                    f"rank {rank} has died since the last call (exit code {self._exit_code(rank)})"
                ) from None

    def _start(self) -> None:
        context = _fork_context()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        rendezvous = os.path.join(self._folder.name, "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, self.world_size, rendezvous, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, deadline: float, name: str, timeout: float) -> dict[int, Any]:
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        while len(results) + len(failures) < self.world_size:
            waiting = {self._workers[r][1]: r for r in range(self.world_size) if r not in results and r not in failures}
            # After one rank has failed the others may wait for it forever: give them a moment to fail by themselves.
            until = min(deadline, time.monotonic() + 5.0) if failures else deadline
            ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    succeeded, value = pipe.recv()
                except EOFError:
                    died = f"the process died (exit code {self._exit_code(rank)})"
                    succeeded, value = False, Failure(died, died)
                (results if succeeded else failures)[rank] = value
        if failures:
            texts = [f"--- {name} on rank {rank}:\n{each.traceback}" for rank, each in sorted(failures.items())]
            raise RankError("\n".join(texts), [each.error for each in failures.values()])
        missing = sorted(set(range(self.world_size)) - set(results))
        if missing:
            raise RankError(
                f"{name}: ranks {missing} were not done after {timeout:.0f} s\n"
                + "\n".join(f"--- rank {rank} was at:\n{self._stack(rank)}" for rank in missing)
            )
        return results

    def _stack(self, rank: int) -> str:
        """Return the stack of a rank that does not answer."""
        assert self._folder is not None
        os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return Path(self._folder.name, f"stack-{rank}").read_text()

    def _exit_code(self, rank: int) -> int | None:
        process = self._workers[rank][0]
        process.join(timeout=5)
        return process.exitcode

    def stop(self) -> None:
        """End all workers; the next ``run`` starts new ones."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


# What building an engine imports: seconds, if every rank did it anew.
_PRELOADED = [
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "requestzero.accelerate.accelerator",
    "requestzero.zero.initialization",
    "requestzero.lightning.strategy",
    "requestzero.zero.engine",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
]


def _fork_context() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with patch.dict(os.environ, TORCH_COMPILE_DISABLE="1", **({} if _has_cuda() else {"DS_ACCELERATOR": "cpu"})):
        forkserver.ensure_running()
    return context


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _worker(rank: int, world_size: int, rendezvous: str, pipe: Connection) -> None:
    try:
        _join(rank, world_size, rendezvous)
    except BaseException as error:
        pipe.recv()
        pipe.send((False, Failure.of(error)))
        return
    gc.freeze()  # DeepSpeed and Accelerate collect garbage often, which would look at all that was imported each time
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            _destroy_engines()
            with _nothing_left_behind():
                pipe.send((True, function(*args, **kwargs)))
        except BaseException as error:
            with contextlib.suppress(OSError):  # the group has been stopped
                pipe.send((False, Failure.of(error)))


def _destroy_engines() -> None:
    """Destroy the engines of earlier calls: each holds weights, a process group and its threads until then.

    Nothing else frees them, since autograd holds an engine's hooks, and they the engine. This comes before a call and
    not after it: by then no other rank is still at work with its part of an engine. What is left then stays for good
    (DeepSpeed's own ZeRO-3 keeps the modules of destroyed engines) and is not looked at again: DeepSpeed collects
    garbage with every engine that it builds.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    for engine in [each for each in gc.get_objects() if issubclass(type(each), DeepSpeedEngine)]:
        engine.destroy()
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _nothing_left_behind() -> Iterator[None]:
    """Restore what libraries change in the process for good, since the next call builds another engine in it.

    Lightning takes WORLD_SIZE out of the environment when a run is over. DeepSpeed's ZeRO-3 keeps a linear function of
    its own in ``torch.nn.functional``, under which a layer's weight gets its gradient before the bias.
    """
    from torch.nn import functional

    with patch.dict(os.environ), patch.object(functional, "linear", functional.linear):
        yield


def _join(rank: int, world_size: int, rendezvous: str) -> None:
    faulthandler.register(signal.SIGUSR1, open(Path(rendezvous).with_name(f"stack-{rank}"), "w"))  # noqa: SIM115
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1")
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # DeepSpeed's Muon compiles for minutes what three small matrices need
    import torch

    torch.set_num_threads(1)
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    with patch.object(torch, "compile", lambda function=None, **_: function or (lambda each: each)):
        # Which every optimizer of ZeRO 3 imports: its decorators would load the compiler.
        import deepspeed.runtime.zero.muon.original_muon

    deepspeed.utils.logger.setLevel("ERROR")
    remember_machine()
    if cuda:
        torch.cuda.set_device(rank)
    from requestzero.zero.process_group import without_inference_operator

    with without_inference_operator():
        deepspeed.init_distributed(
            "nccl" if cuda else "gloo",
            auto_mpi_discovery=False,
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            verbose=False,
        )
