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

WORD = re.compile(r"\S+")
USER_INFO = re.compile(r"(?<=://)([^:/?#@]*):.*", re.DOTALL)  # in what stands before the last @ of a word
PARAMETER = re.compile(r"(?<=[?&])([^\s=&?]+)=([^\s&#,]+)")
DEPTH = 50  # collections in one another
UNMASKED = "<not shown, because its passwords could not be masked>"


class MaskingReporterFilter(SafeExceptionReporterFilter):
    """
    Mask passwords in URLs, in addition to what Django masks: in the setting ``REDLOCK`` and in the variables of frames.

    A variable may have a node's URL under any name, so every URL in the variables is masked, whatever it is for. The
    filter looks into dicts, lists and tuples, and shows none that is inside more than 50 others. It does not look into
    other objects: their ``repr()`` is shown. It masks even with ``DEBUG = True``. Other settings are shown as Django
    shows them.
    """

    def cleanse_setting(self, key: str | int, value: Any) -> Any:
        """Return a setting as Django would show it, with the passwords of URLs masked in ``REDLOCK``."""
        cleansed = super().cleanse_setting(key, value)
        return self._masked(cleansed) if key == "REDLOCK" else cleansed

    def get_traceback_frame_variables(self, request: HttpRequest | None, tb_frame: Any) -> ItemsView[str, Any]:
        """Return the variables of a frame, with the passwords of URLs masked in strings and in collections of them."""
        return {
            name: self._shown(value) for name, value in super().get_traceback_frame_variables(request, tb_frame)
        }.items()

    def _shown(self, value: Any) -> Any:
        try:
            return self._masked(value)
        except Exception:  # which would hide the error that is reported
            return UNMASKED

    def _masked(self, value: Any, around: tuple[int, ...] = ()) -> Any:
        """Return a value without passwords; *around* has the ids of the collections that contain it."""
        kind = type(value)  # isinstance() would evaluate a lazy object
        if issubclass(kind, str):
            text = WORD.sub(self._masked_user_info, value)
            return PARAMETER.sub(self._masked_parameter, text) if "://" in text else text
        if not issubclass(kind, (dict, list, tuple)):
            return value
        if id(value) in around or len(around) == DEPTH:
            return UNMASKED
        around = (*around, id(value))
        if issubclass(kind, dict):
            return {self._masked(key): self._masked_item(key, each, around) for key, each in dict.items(value)}
        masked = [self._masked(each, around) for each in value]
        return masked if issubclass(kind, list) else tuple(masked)

    def _masked_item(self, key: Any, value: Any, around: tuple[int, ...]) -> Any:
        hidden = super().cleanse_setting(key, None) is not None
        return self.cleansed_substitute if hidden else self._masked(value, around)

    def _masked_user_info(self, word: re.Match[str]) -> str:
        # Up to the last @ before a blank: hiding the host of the next URL is better than showing part of a password.
        before, at, host = word[0].rpartition("@")
        return USER_INFO.sub(rf"\1:{self.cleansed_substitute}", before) + at + host

    def _masked_parameter(self, found: re.Match[str]) -> str:
        secret = self.hidden_settings.search(found[1])
        return f"{found[1]}={self.cleansed_substitute if secret else found[2]}"
