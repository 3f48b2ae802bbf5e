from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed import ReduceOp as ReduceOp

def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = ...,
    verbose: bool = True,
    timeout: timedelta = ...,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None: ...
def get_rank(group: ProcessGroup | None = None) -> int: ...
def get_world_size(group: ProcessGroup | None = None) -> int: ...
def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int: ...
def all_reduce(
    tensor: torch.Tensor,
    op: Any = ...,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = ...,
) -> Any: ...
def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Any = ...,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: Any = ...,
) -> Any: ...
def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all_single",
    debug: Any = ...,
) -> Any: ...
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = ...,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: Any = ...,
) -> Any: ...
def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ...,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: Any = ...,
) -> Any: ...
def broadcast(
    tensor: torch.Tensor,
    src: int,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "broadcast",
    debug: Any = ...,
) -> Any: ...
def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ...,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    debug: Any = ...,
) -> Any: ...
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: Any = ...,
) -> Any: ...
def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    debug: Any = ...,
) -> Any:
    """Called by gathers of weights."""

def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: Any = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: Any = ...,
) -> Any: ...
def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: ProcessGroup | None = None,
    prof: bool = False,
    log_name: str = "all_gather_object",
    debug: Any = ...,
) -> None: ...
def broadcast_object_list(
    object_list: list[Any],
    src: int,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    prof: bool = False,
    log_name: str = "broadcast_object_list",
    debug: Any = ...,
) -> None: ...
