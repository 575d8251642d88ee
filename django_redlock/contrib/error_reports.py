"""
Mask the passwords of ``REDLOCK`` in Django's own error reports: the debug page and the mails to ``ADMINS``.

Django masks a setting by its name, and a dict's value by its key. A node's URL that contains a password has no such
name, so Django shows it: in the setting, and in the variables of frames that have read it. Write::

    DEFAULT_EXCEPTION_REPORTER_FILTER = "django_redlock.contrib.error_reports.MaskingReporterFilter"
"""

import re
from collections.abc import ItemsView
from typing import Any

from django.http import HttpRequest
from django.views.debug import SafeExceptionReporterFilter

# Up to the last @ before a blank: hiding the host of the next URL is better than showing part of a password.
USER_INFO = re.compile(r"(?<=://)([^\s:/?#@]*):\S*@")
PARAMETER = re.compile(r"(?<=[?&])([^\s=&?]+)=([^\s&#,]+)")


class MaskingReporterFilter(SafeExceptionReporterFilter):
    """
    Mask passwords in URLs, in addition to what Django masks: in the setting ``REDLOCK`` and in the variables of frames.

    A variable may have a node's URL under any name, so every URL in the variables is masked, whatever it is for. The
    filter looks into dicts, lists and tuples at any depth. It does not look into other objects: their ``repr()`` is
    shown. It masks even with ``DEBUG = True``. Other settings are shown as Django shows them.
    """

    def cleanse_setting(self, key: str | int, value: Any) -> Any:
        """Return a setting as Django would show it, with the passwords of URLs masked in ``REDLOCK``."""
        cleansed = super().cleanse_setting(key, value)
        return self._masked(cleansed) if key == "REDLOCK" else cleansed

    def get_traceback_frame_variables(self, request: HttpRequest | None, tb_frame: Any) -> ItemsView[str, Any]:
        """Return the variables of a frame, with the passwords of URLs masked in strings and in collections of them."""
        variables = super().get_traceback_frame_variables(request, tb_frame)
        return {
            name: self._masked(self.cleanse_setting("", value)) if type(value) in (str, dict, list, tuple) else value
            for name, value in variables
        }.items()

    def _masked(self, value: Any) -> Any:
        match value:
            case str():
                text = USER_INFO.sub(rf"\1:{self.cleansed_substitute}@", value)
                return PARAMETER.sub(self._masked_parameter, text) if "://" in text else text
            case dict():
                return {key: self._masked(each) for key, each in value.items()}
            case list():
                return [self._masked(each) for each in value]
            case tuple():
                return tuple(self._masked(each) for each in value)
        return value

    def _masked_parameter(self, found: re.Match[str]) -> str:
        secret = self.hidden_settings.search(found[1])
        return f"{found[1]}={self.cleansed_substitute if secret else found[2]}"
