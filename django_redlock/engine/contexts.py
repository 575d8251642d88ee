"""
Objects that are used as ``with`` and ``async with`` blocks, and can be used again.

``contextlib`` makes a context manager of a generator, for a single block. Here an object with options makes one for
each of its blocks, and leaves the one that it is in.
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
        """Return what is entered and left by the next ``with`` block."""

    @abstractmethod
    def _ahold(self) -> AbstractAsyncContextManager[Result]:
        """Return what is entered and left by the next ``async with`` block."""

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
        """Whether a ``with`` block is inside it now."""
        return self._entered is not None

    def _refuse_nesting(self) -> None:
        if self._entered is not None or self._aentered is not None:
            raise RuntimeError(f"{self!r} is already entered; {self.remedy}")
