"""Raise an exception at one point of the code that runs in a thread, and count the points."""

import dis
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

PACKAGE = "/django_redlock/"
NEVER = 1_000_000_000  # a point that no code has

CHECKED = {code for name, code in dis.opmap.items() if name.startswith(("CALL", "JUMP_BACKWARD", "RESUME"))} - {
    dis.opmap.get("CALL_INTRINSIC_1"),
    dis.opmap.get("CALL_INTRINSIC_2"),
    dis.opmap.get("JUMP_BACKWARD_NO_INTERRUPT"),
}
"""Instructions after which the interpreter runs signal handlers."""

NONES = [dis.opmap["LOAD_CONST"]] * 3

Line = tuple[str, int]
"""A file and the number of a line in it."""


class Interrupted(BaseException):
    """Raised by the signal handler."""


class Passage(NamedTuple):
    """
    One of the points of a line.

    Attributes:
        line: The line.
        number: Which of its points: 1 is the first that the code reaches.
    """

    line: Line
    number: int


class Trap:
    """
    Raises :class:`Interrupted` at one point of the code that runs in this thread; counts the points.

    Args:
        at: The point at which to raise, counted over all lines from 0, or counted over one line.
        lines: Whether lines are points, too.
        again: Raise once more, at the start of the function or the end of the call of a C function that has this number
            among those that follow; None for no second time.
        opcodes: Whether there are points inside lines. To find out which lines are reached, they are not needed.
    """

    def __init__(
        self, at: int | Passage, lines: bool = False, again: int | None = None, *, opcodes: bool = True
    ) -> None:
        self.at = at
        self.passed = 0
        self.passages: Counter[Line] = Counter()
        self.spared: set[Line] = set()  # where no signal handler can run
        self.sprung = False
        self.sprung_again = False
        self.where = ""
        self._lines = lines
        self._again = again
        self._opcodes = opcodes
        self._last: dict[int, int] = {}

    @contextmanager
    def set(self) -> Iterator[None]:
        """Raise in a call of this thread in the block, and swallow the exception at the end."""
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            with suppress(Interrupted):
                yield
        finally:
            sys.settrace(before)
            if self._again is not None:
                sys.setprofile(None)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self.sprung or not self._is_traced(frame):
            return None
        frame.f_trace_opcodes = self._opcodes
        self._last.pop(id(frame), None)
        return self._on_event

    def _is_traced(self, frame: FrameType) -> bool:
        if isinstance(self.at, int) or PACKAGE not in self.at.line[0]:  # other code counts if this package calls it
            return is_inside(frame)
        return self.at.line in lines_of(frame.f_code)

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            operation = frame.f_code.co_code[frame.f_lasti]
            last, self._last[id(frame)] = self._last.get(id(frame)), operation
            # The interpreter checks at the end of the call itself, which is still inside a block that is left next.
            if (last is None or last in CHECKED) and not leaves_block(frame.f_code, frame.f_lasti):
                self._pass(frame)
        elif event == "line" and self._lines:
            if leaves_block(frame.f_code, frame.f_lasti) or begins_try(frame):
                self.spared.add((frame.f_code.co_filename, frame.f_lineno))
            elif not begins_anew(frame):
                self._pass(frame)
        elif event == "return":
            self._last.pop(id(frame), None)
        return None if self.sprung else self._on_event

    def _pass(self, frame: FrameType) -> None:
        line = (frame.f_code.co_filename, frame.f_lineno)
        self.passed += 1
        self.passages[line] += 1
        at = self.at
        self.sprung = self.passed > at if isinstance(at, int) else at == (line, self.passages[line])
        if self.sprung:
            self.where = place_of(frame)
            sys.settrace(None)
            if self._again is not None:
                sys.setprofile(self._on_profile)
            raise Interrupted

    def _on_profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """Raise for the second time: after the first, Python calls no trace function any more, but this one."""
        assert self._again is not None
        if PACKAGE not in frame.f_code.co_filename or event not in ("call", "c_return"):
            return
        self._again -= 1
        if self._again < 0:
            self.sprung_again = True
            self.where += f" and {place_of(frame)}"
            sys.setprofile(None)
            raise Interrupted


def is_inside(frame: FrameType) -> bool:
    """Return whether a frame is one of the package, or is called by it and is to be interrupted."""
    file = frame.f_code.co_filename
    # Interrupted in its own code, Python's logging leaves the lock of a handler held, and asyncio leaves a task
    # that waits for ever for a finished future.
    if "/tests/lab/interrupts/" in file or file.endswith("logging/__init__.py") or "/asyncio/" in file:
        return False
    return PACKAGE in file or (frame.f_back is not None and frame.f_back.f_trace is not None)


@cache
def lines_of(code: CodeType) -> frozenset[Line]:
    """Return the lines of a function."""
    return frozenset((code.co_filename, line) for _, _, line in code.co_lines() if line)


def place_of(frame: FrameType) -> str:
    """Return where a frame is, for people."""
    return f"{frame.f_code.co_filename.rpartition(PACKAGE)[2]}:{frame.f_lineno} ({frame.f_code.co_name})"


def begins_try(frame: FrameType) -> bool:
    """Return whether the line is a bare ``try:``, which checks for no signal, and which no block around it guards."""
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["NOP"]


def begins_anew(frame: FrameType) -> bool:
    """
    Return whether a loop goes back to its first line.

    In a comprehension inside ``with``, an exception that a trace function raises there skips the end of the block;
    one that a signal handler raises does not (Python 3.12 and 3.13).
    """
    return frame.f_code.co_code[frame.f_lasti] in (dis.opmap["FOR_ITER"], dis.opmap["JUMP_BACKWARD"])


def leaves_block(code: CodeType, at: int) -> bool:
    """Return whether at this instruction a ``with`` block begins to be left: its ``__exit__`` is called next."""
    operations = [code.co_code[place] for place in range(at, min(at + 24, len(code.co_code)), 2)]
    operations = [operation for operation in operations if dis.opname[operation] not in ("NOP", "CACHE", "SWAP")]
    return operations[:3] == NONES and dis.opname[[*operations, 0][3]] in ("CALL", "PRECALL")
