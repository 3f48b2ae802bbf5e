from .comm import ReduceOp as ReduceOp
from .comm import all_gather_object as all_gather_object
from .comm import all_reduce as all_reduce
from .comm import broadcast_object_list as broadcast_object_list
from .comm import get_global_rank as get_global_rank
from .comm import get_rank as get_rank
from .comm import get_world_size as get_world_size
from .comm import reduce as reduce
