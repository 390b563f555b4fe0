"""Compiled parts (shared libraries and BPF objects); built by ``make``, located by ``checkmate.native.library``."""
