"""A frozen teacher whose weights are partitioned over the data-parallel ranks by DeepSpeed."""

from __future__ import annotations

from torch import nn

from vocabtp.opsd.config import Config
from vocabtp.opsd.engine.deepspeed_json import frozen, values_named
from vocabtp.opsd.engine.deepspeed_start import ranks_of, start
from vocabtp.opsd.engine.places import make_plain
from vocabtp.opsd.parallel import Layout
from vocabtp.opsd.sharding import mark_sharded


def partition(module: nn.Module, config: Config, layout: Layout) -> None:
    """Leave each rank its part of every weight; a forward gathers a layer at a time.

    The model is whole on each data-parallel copy before. All copies have to run equally many
    forwards from then on.

    Args:
        module: The teacher, frozen, cut over the tensor-parallel ranks already if it is to be.
        config: The run's configuration.
        layout: The ranks.
    """
    dtype = next(module.parameters()).dtype
    deepspeed = start(layout)
    make_plain(module)
    with values_named():
        engine, *_ = deepspeed.initialize(
            model=module, config=frozen(config, layout), mpu=ranks_of(layout)
        )
    # the engine takes its hooks away when it ends
    module.__dict__["_vocabtp_deepspeed"] = engine
    mark_sharded(module, dtype)
