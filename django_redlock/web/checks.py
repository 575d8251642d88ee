"""A system check for mistakes in views that their decorator cannot see (internal)."""

from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, register
from django.urls import URLPattern, URLResolver, get_resolver

from ..views import MISSING_KEY, Decorator


@register(Tags.urls)
def check_views(**kwargs: Any) -> list[CheckMessage]:
    """Report the views that were decorated with ``@locked_view`` but without a key."""
    if not getattr(settings, "ROOT_URLCONF", None):
        return []
    return [
        Error(
            f"The view of the URL pattern {str(pattern.pattern)!r} is not locked, and fails at its first request.",
            hint=MISSING_KEY,
            id="redlock.E012",
        )
        for pattern in _patterns(get_resolver())
        if isinstance(pattern.callback, Decorator)
    ]


def _patterns(resolver: URLResolver) -> Iterator[URLPattern]:
    for pattern in resolver.url_patterns:
        if isinstance(pattern, URLResolver):
            yield from _patterns(pattern)
        else:
            yield pattern
