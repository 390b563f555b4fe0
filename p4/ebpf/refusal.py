"""Why the server refuses something, in the codes of google.rpc.Code that the P4Runtime specification demands."""

from typing import NoReturn

from ..shared.messages import code_pb2


class Refusal(Exception):
    """A request or a part of one that is not carried out; ``code`` is a google.rpc.Code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{code_pb2.Code.Name(self.code)}: {self.message}"


def invalid(message: str) -> NoReturn:
    """Refuse a malformed request."""
    raise Refusal(code_pb2.INVALID_ARGUMENT, message)
