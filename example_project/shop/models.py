"""The shop's articles, its sales, and the imports of its catalogue."""

from datetime import datetime

from django.conf import settings
from django.db import models


class StockItem(models.Model):
    """An article on the shelf. Its stock is changed only under ``lock_for_update``."""

    sku = models.CharField(max_length=20, unique=True)
    name = models.CharField(max_length=100)
    price = models.DecimalField(max_digits=8, decimal_places=2)
    stock = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["sku"]

    def __str__(self) -> str:
        return self.name


class Order(models.Model):
    """One piece, sold."""

    item = models.ForeignKey(StockItem, on_delete=models.PROTECT, related_name="orders")
    buyer = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="orders")
    price = models.DecimalField(max_digits=8, decimal_places=2)
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-created"]

    def __str__(self) -> str:
        return f"{self.item} for {self.buyer}"


class ImportRun(models.Model):
    """One import, as recorded by the worker that ran it."""

    task_id = models.CharField(max_length=50)
    worker_pid = models.PositiveIntegerField()
    rows = models.PositiveIntegerField(default=0)
    started = models.DateTimeField(auto_now_add=True)
    updated = models.DateTimeField(auto_now=True)
    finished = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-started"]

    def __str__(self) -> str:
        return f"import {self.pk}"

    @property
    def ended(self) -> datetime:
        """Return when it finished, or was last active."""
        return self.finished or self.updated
