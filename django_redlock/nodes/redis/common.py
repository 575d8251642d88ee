"""
Decide on their bytes the two replies that nearly every lock gets (internal).

Reading any reply takes several functions and objects. Most replies have one of two forms, which one regular expression
recognizes. Whatever it does not recognize is read by :mod:`.resp` and :mod:`.decode`.
"""

import re

from ...core.replies import Kind, Reply
from ...core.requests import HIGHEST, PART, Acquire, Release, Request

# The node grants a free lock and accepts its token, or it releases a lock. Their numbers have 16 digits until the year
# 2286, so each form has one length.
COMMON = re.compile(rb"\$48\r\nACCEPTED (\d{16}) (\d{16}) 0 -1 \r\n|\$33\r\nRELEASED 0 (\d{16}) 0 -1 \r\n")


def common_reply(request: Request, found: re.Match[bytes]) -> Reply | None:
    """Return the reply that ``COMMON`` has found, or None if it cannot be the whole reply to *request*."""
    number, time, released = found.groups()
    if isinstance(request, Acquire) and released is None:
        fence, now, kind = int(number), int(time), Kind.ACCEPTED
        sound = fence == request.number
    elif isinstance(request, Release) and released is not None:
        fence, now, kind = 0, int(released), Kind.RELEASED
        sound = True
    else:
        return None
    return Reply(kind, fence, now) if sound and now <= HIGHEST and len(request.slugs) <= PART else None
