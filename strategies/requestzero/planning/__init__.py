"""Plans of the sequences that every data-parallel rank runs, and in which order: pure functions of lengths.

Nothing here imports torch or communicates: every rank makes the same plan and runs its own share.
"""

from requestzero.planning.bad_requests import BadRequestPolicy
from requestzero.planning.budget import Budget
from requestzero.planning.order import RequestOrder
from requestzero.planning.planner import Planner
from requestzero.planning.statistics import PlanStatistics
from requestzero.planning.window_plan import MicroBatchPlan, RequestPlan, WindowPlan, plan_window
from requestzero.planning.windows import WindowRule

__all__ = [
    "BadRequestPolicy",
    "Budget",
    "MicroBatchPlan",
    "PlanStatistics",
    "Planner",
    "RequestOrder",
    "RequestPlan",
    "WindowPlan",
    "WindowRule",
    "plan_window",
]
