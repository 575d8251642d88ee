"""The shop with django-debug-toolbar."""

from django.urls import include, path

from .urls import urlpatterns as shop

urlpatterns = [*shop, path("__debug__/", include("debug_toolbar.urls"))]
