"""Shadows in the trainer's own process that compare digests: the tests' small one, and a real one over sockets."""

import ctypes
from typing import Any

from checkmate.protocol import Digests, Message
from checkmate.shadow.staging import Ready
from checkmate.shadow.verify import Verification, Verifier
from support.shadow import FakeReceiver
from support.train.direct import DirectShadow
from support.train.fake_shadow import FakePlugin
from support.trainer import over_the_wire


class VerifyingShadow(DirectShadow):
    """A DirectShadow with the real Verifier; a mismatch ends following."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.verifier = Verifier()

    @property
    def summary(self) -> Verification:
        """What was compared so far."""
        return self.verifier.summary(self._working)

    def take(self, message: Message) -> None:
        if isinstance(message, Digests):
            self.verifier.expect(over_the_wire(message))
        super().take(message)

    def _apply(self, working: Any, ready: Ready) -> None:
        super()._apply(working, ready)
        self.verifier.compare(working, ready.layout)


class Mirror(FakePlugin):
    """Copies each all-reduced bucket of a world of one rank to a shadow's receiver, as the switch would."""

    def __init__(self, receiver: FakeReceiver) -> None:
        super().__init__()
        self._receiver = receiver

    def register_bucket(self, ptr: int, nbytes: int, bucket: int) -> None:
        super().register_bucket(ptr, nbytes, bucket)
        self._receiver.complete(self.incarnation, self.iteration, bucket, ctypes.string_at(ptr, nbytes))
