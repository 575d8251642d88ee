"""
Objects that can be used for one ``with`` or ``async with`` block after another (internal).

``contextlib`` makes a context manager from a generator, for a single block. Here an object with options makes a new
context manager for each of its blocks, and leaves that of the present block.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Generic, TypeVar

Result = TypeVar("Result", covariant=True)


class Block(ABC, Generic[Result]):
    """An object that is used for one ``with`` or ``async with`` block at a time."""

    remedy = ""
    """The advice in the error about entering it twice."""

    def __init__(self) -> None:
        self._entered: AbstractContextManager[Result] | None = None
        self._aentered: AbstractAsyncContextManager[Result] | None = None

    @abstractmethod
    def _hold(self) -> AbstractContextManager[Result]:
        """Return the context manager that the next ``with`` block enters and leaves."""

    @abstractmethod
    def _ahold(self) -> AbstractAsyncContextManager[Result]:
        """Return the context manager that the next ``async with`` block enters and leaves."""

    def __enter__(self) -> Result:
        self._refuse_nesting()
        entering = self._hold()
        result = entering.__enter__()
        self._entered = entering
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._entered is not None
        entered, self._entered = self._entered, None
        return entered.__exit__(kind, error, trace)

    async def __aenter__(self) -> Result:
        self._refuse_nesting()
        entering = self._ahold()
        result = await entering.__aenter__()
        self._aentered = entering
        return result

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._aentered is not None
        entered, self._aentered = self._aentered, None
        return await entered.__aexit__(kind, error, trace)

    @property
    def is_entered(self) -> bool:
        """Whether a ``with`` block of this object is open now."""
        return self._entered is not None

    def _refuse_nesting(self) -> None:
        if self._entered is not None or self._aentered is not None:
            raise RuntimeError(f"{self!r} is already entered; {self.remedy}")
