"""What the admin of held locks and that of former locks have in common (internal)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import django
from django.contrib import admin
from django.http import HttpRequest
from django.template.response import TemplateResponse

from .rows import labelled

if TYPE_CHECKING:
    AnyModelAdmin = admin.ModelAdmin[Any]
else:
    AnyModelAdmin = object


class ReadOnlyAdmin(AnyModelAdmin):
    """An admin of rows that code alone writes: not even a superuser adds, changes or deletes one."""

    def has_add_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Return False."""
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def page(self, request: HttpRequest, template: str, **context: Any) -> TemplateResponse:
        """Return a page in the frame of the admin."""
        request.current_app = self.admin_site.name
        shared = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "breadcrumb_list": django.VERSION >= (6, 1),  # in earlier versions they were a <div>
        }
        return TemplateResponse(request, template, {**shared, **context})


def column(title: Any, cell: Callable[[Any], str], ordering: str | None = None) -> Callable[[Any, Any], str]:
    """
    Return a method of an admin that shows a cell of a row, with the title of its column.

    Args:
        title: The title.
        cell: Returns the cell of a row, without the title.
        ordering: The field by which the column sorts.
    """

    def shown(self: object, row: Any) -> str:
        return labelled(title, cell(row))

    return admin.display(description=title, ordering=ordering)(shown)
