"""What is said of arguments of the command line that are refused."""

import pytest

from dapo.config.compose import checked_overrides


def said(*arguments: str) -> str:
    with pytest.raises(ValueError) as error:
        checked_overrides(arguments)
    return str(error.value)
