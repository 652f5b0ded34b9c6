"""A plan by the compiler: the train step compiled, its buffers and its schedule read."""

import dataclasses
from collections.abc import Callable

from moejax.config import Config
from moejax.plan.compile import Compiled, compile_step
from moejax.plan.estimate import Memory, Sizes
from moejax.plan.hardware import Cluster
from moejax.plan.plans import Plan, make_plan
