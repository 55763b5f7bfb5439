"""Plans of experiments, each made once."""

import functools

from dapo.plan.__main__ import plan


@functools.cache
def planned(*overrides, experiment="dapo_qwen32b"):
    return plan([f"+experiment={experiment}", *overrides])
