"""The switch: one set of rules for several targets, controlled over P4Runtime."""

from pkgutil import extend_path

# Started from the source tree, Python takes this folder for the PyPI package `p4` (P4Runtime's protobufs): find both.
__path__ = extend_path(__path__, __name__)
