"""How all tests are run."""

from hypothesis import settings

settings.register_profile("checkmate", deadline=None)  # a busy machine is no failure
settings.load_profile("checkmate")
