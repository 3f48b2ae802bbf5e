"""Process groups where Accelerate or DeepSpeed would find none: on the CPU, and in a process without a launcher.

Written for Accelerate 1.15.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env, patch_environment

from requestzero.zero.process_group import without_inference_operator


def join_ranks() -> None:
    """Join the ranks of a launcher with gloo, on the CPU. Collective there.

    Accelerate finds no backend for DeepSpeed on the CPU, and every rank would believe to be alone. Elsewhere it joins
    them itself, when the ``Accelerator`` is built. A process group that exists
    (``torch.distributed.init_process_group``) is used as it is.

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
    """Let DeepSpeed find a process group while the block runs, also in a process that no launcher has started.

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
