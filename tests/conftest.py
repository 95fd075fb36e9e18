"""What every test shares: how hypothesis searches."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

# The same examples every time: a change fails because of what it changed, never because of the day's luck.
settings.register_profile("default", derandomize=True, deadline=None, print_blob=True)
# The search proper: more examples, new ones at every run; the printed blob reproduces a failure.
settings.register_profile("thorough", max_examples=1000, derandomize=False, deadline=None, print_blob=True)
settings.load_profile("default")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads, and what a command sets for itself does not outlive its test."""
    import torch

    was = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(was)
