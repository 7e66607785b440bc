"""What the ranks of a sharded training need, imported once by the process that forks them (`sharded_models.FORKED`)."""

import sharded_kills  # noqa: F401
import sharded_runs  # noqa: F401
import torch._dynamo  # noqa: F401 - FSDP2 imports it when it shards: a second for each process

import weightcast

weightcast.warm_up()
