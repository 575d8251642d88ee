"""Run an action when a function reaches one of its own lines (internal)."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

TOOL = 4  # one of the ids of sys.monitoring that any tool may use


@contextmanager
def before_line(function: Callable[..., Any], text: str, action: Callable[[], object]) -> Iterator[None]:
    """Call *action* when *function* first reaches the line that contains *text*; see ``Simulation.at``."""
    plain = inspect.unwrap(function)
    code, number = plain.__code__, line_number(plain, text)
    calls: list[Callable[[], object]] = [action]

    def reached() -> None:
        if calls:
            calls.pop()()

    with watching(code, number, reached):
        yield
    if calls:
        raise AssertionError(f"{plain.__qualname__} did not reach the line with {text!r}.")


def line_number(function: Any, text: str) -> int:
    """
    Return the number of the only line of *function* that contains *text*.

    Raises:
        ValueError: There is no such line, or more than one.
    """
    lines, first = inspect.getsourcelines(function)
    found = [number for number, line in enumerate(lines, first) if text in line]
    if len(found) != 1:
        raise ValueError(f"{function.__qualname__} has {len(found)} lines with {text!r}; name one that it has once.")
    return found[0]


if sys.version_info >= (3, 12):

    @contextmanager
    def watching(code: CodeType, number: int, reached: Callable[[], None]) -> Iterator[None]:
        """Call *reached* before the line is executed; debuggers and coverage still work."""
        monitoring = sys.monitoring

        def on_line(_code: CodeType, line: int) -> None:
            if line == number:
                reached()

        monitoring.use_tool_id(TOOL, "django_redlock")
        try:
            monitoring.register_callback(TOOL, monitoring.events.LINE, on_line)
            monitoring.set_local_events(TOOL, code, monitoring.events.LINE)
            yield
        finally:
            monitoring.set_local_events(TOOL, code, 0)
            monitoring.free_tool_id(TOOL)

else:

    @contextmanager
    def watching(code: CodeType, number: int, reached: Callable[[], None]) -> Iterator[None]:
        """Call *reached* before the line is executed; no other tool can trace meanwhile."""

        def on_call(frame: FrameType, event: str, arg: Any) -> Any:
            return on_line if frame.f_code is code else None

        def on_line(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line" and frame.f_lineno == number:
                reached()
            return on_line

        before = sys.gettrace()
        sys.settrace(on_call)
        try:
            yield
        finally:
            sys.settrace(before)
