"""The ranks that a launcher has started, joined on the CPU too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env, patch_environment

from requestzero.zero.process_group import without_inference_operator


def join_ranks() -> None:
    """On the CPU, join the ranks with gloo; elsewhere Accelerate does it itself when the ``Accelerator`` is built.

    Accelerate 1.15 finds no backend for DeepSpeed on the CPU, and every rank would believe to be alone. A process
    group that exists (``torch.distributed.init_process_group``) is used as it is.

    Raises:
        RuntimeError: a ``PartialState`` or ``Accelerator`` exists already, in which every rank is alone.
        ValueError: ``ACCELERATE_USE_CPU`` is set, with which Accelerate leaves DeepSpeed out.
    """
    if parse_flag_from_env("ACCELERATE_USE_CPU"):
        raise ValueError(
            "$ACCELERATE_USE_CPU makes Accelerate leave DeepSpeed out: unset it. To use the CPU on a machine with "
            "GPUs, hide them with CUDA_VISIBLE_DEVICES=-1 (gpu_ids: '-1' in accelerate's config file)."
        )
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if PartialState._shared_state != {}:
        found = PartialState().num_processes
        if found != ranks:
            raise RuntimeError(
                f"Accelerate's PartialState was made before the RequestZeROPlugin and knows {found} process, but there "
                f"are {ranks} ($WORLD_SIZE): build the plugin before anything that makes a PartialState, such as an "
                "Accelerator, accelerate's logging, or TrainingArguments (there, set use_cpu=True)."
            )
        return
    if "LOCAL_RANK" in os.environ and torch.accelerator.current_accelerator(check_available=True) is None:
        with patch_environment(ACCELERATE_USE_DEEPSPEED="true"), without_inference_operator():
            PartialState(backend="gloo")


@contextmanager
def process_group() -> Iterator[None]:
    """While the block runs, DeepSpeed finds a process group, also in a process that no launcher has started.

    There it would look for an MPI environment, and fail where there is none. The group of one rank stays.
    """
    if any(name in os.environ for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_SIZE")):
        yield
        return
    if not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    with patch_environment(LOCAL_RANK="0"):
        yield
