"""Defaults and limits that more than one part of Checkmate uses: each is defined here alone."""

DSCP_TAG = 0x20
"""Bit of the 6-bit DSCP field that marks the tagged flow (nccl_plugin/include/checkmate/wire.h)."""

MTU_CHOICES = (1500, 9000)
MIN_RANKS = 2

CONTROL_PORT = 7701
"""TCP port of a shadow's control server on the management network: records, seeds, restores."""

REGISTRATION_PORT = 7702
"""TCP port of the registration server on the management network."""

P4RUNTIME_PORT = 9559
"""TCP port of the switch's P4Runtime server (IANA: p4runtime)."""

SHADOW_RID = 1
"""Replica id of copies for a shadow's port; replicas for the next rank have rid 0."""

POLICIES = ("isolate", "lossless")
"""What a hardware switch does when a shadow is slower than training: drop its copies, or pause the senders (PFC)."""

TAGGED_CLASS = 4
"""Traffic class of tagged frames in a hardware switch: ingress class, queue of each port, and PFC priority.

4 is where NICs that trust the DSCP put the default tag, 0x20, by themselves (priority = DSCP >> 3).
"""

ENV_PREFIX = "CHECKMATE_"


class CheckmateError(Exception):
    """An error that the user can fix: the text names the field, its value, what is allowed and what to do."""
