"""
Recognize by their bytes the two replies that nearly every lock gets (internal).

Reading an arbitrary reply takes several functions and objects. Most replies have one of two forms, which one regular
expression recognizes. :mod:`.resp` and :mod:`.decode` read all other replies.
"""

import re

from ...core.protocol import HIGHEST, PART, Acquire, Kind, Release, Reply, Request

# The node grants a free lock and accepts its token, or it releases a lock. The numbers have 16 digits until the year
# 2286, so each form has a fixed length.
COMMON = re.compile(rb"\$48\r\nACCEPTED (\d{16}) (\d{16}) 0 -1 \r\n|\$33\r\nRELEASED 0 (\d{16}) 0 -1 \r\n")


def common_reply(request: Request, found: re.Match[bytes]) -> Reply | None:
    """Return the reply that ``COMMON`` matched, or None if it cannot be the whole reply to *request*."""
    if found.lastindex == 2 and isinstance(request, Acquire):
        number, now = int(found[1]), int(found[2])
        reply = Reply(Kind.ACCEPTED, number, now) if number == request.number else None
    elif found.lastindex == 3 and isinstance(request, Release):
        now = int(found[3])
        reply = Reply(Kind.RELEASED, 0, now)
    else:
        return None
    return reply if now <= HIGHEST and len(request.slugs) <= PART else None
