"""What every test shares: how hypothesis searches."""

from hypothesis import settings

# The same examples every time: a change fails because of what it changed, never because of the day's luck.
settings.register_profile("default", derandomize=True, deadline=None, print_blob=True)
# The search proper: more examples, new ones at every run; the printed blob reproduces a failure.
settings.register_profile("thorough", max_examples=1000, derandomize=False, deadline=None, print_blob=True)
settings.load_profile("default")
