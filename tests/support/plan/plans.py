"""Plans of experiments, each made once."""

import functools

from dapo.tools.plan.__main__ import configuration, known_shape


@functools.cache
def planned(*overrides, experiment="dapo_qwen32b"):
    cfg = configuration([f"+experiment={experiment}", *overrides])
    return cfg, known_shape(cfg)
