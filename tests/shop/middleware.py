"""One request at a time on some paths."""

import re

from django_redlock.middleware import locked_paths

one_per_user = locked_paths(["/touch/", "/pay/", re.compile(r"^/a?stream/\d+/$"), "/apay/"])
one_per_order = locked_paths(["/"], lambda request: request.path.split("/")[2], methods=["GET"], on_busy=429)
