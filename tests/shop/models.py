"""Rows of every shape that can be locked."""
# ruff: noqa: DJ008

import uuid
from typing import Any

from django.db import models

from django_redlock.fenced_models import FencedModel
from django_redlock.querysets import LockableQuerySet


class Order(models.Model):
    number = models.CharField(max_length=20, default="")
    total = models.IntegerField(default=0)
    paid = models.BooleanField(default=False)

    objects = LockableQuerySet.as_manager()


class OrderProxy(Order):
    class Meta:
        proxy = True


class GiftOrder(Order):
    """A table of its own, whose rows are also orders."""

    greeting = models.CharField(max_length=20, default="")


class WrappedGiftOrder(GiftOrder):
    paper = models.CharField(max_length=20, default="")


class Draft(models.Model):
    """Its instances note what was read, as packages do that save only what has changed."""

    text = models.CharField(max_length=20, default="")

    def refresh_from_db(self, *args: Any, **kwargs: Any) -> None:
        super().refresh_from_db(*args, **kwargs)
        self.read = self.text


class Parcel(models.Model):
    code = models.CharField(max_length=20, primary_key=True)


class Letter(models.Model):
    stamp = models.AutoField(primary_key=True)


class ParcelLetter(Parcel, Letter):
    """A row of two tables, with a key in each."""


class RegisteredLetter(Letter):
    """A row that is also a letter, with a key of its own."""

    number = models.AutoField(primary_key=True)
    letter = models.OneToOneField(Letter, on_delete=models.CASCADE, parent_link=True)


class Voucher(models.Model):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)


class Stock(models.Model):
    pk = models.CompositePrimaryKey("place", "article")
    place = models.CharField(max_length=20)
    article = models.CharField(max_length=20)
    count = models.IntegerField(default=0)


class Invoice(models.Model):
    """Its primary key is the order's."""

    order = models.OneToOneField(Order, on_delete=models.CASCADE, primary_key=True)


class Pallet(FencedModel):
    """Rows that know their latest writer."""

    weight = models.IntegerField(default=0)


class CoolPallet(Pallet):
    """Its fence is in the table of the parent."""

    degrees = models.IntegerField(default=0)


class NumberedPallet(FencedModel, Parcel):
    """Its fence is in its own table, and its key in that of the parent."""

    number = models.IntegerField(default=0)


class Crate(FencedModel):
    """Rows that know their latest writer, with a key of two columns."""

    pk = models.CompositePrimaryKey("place", "article")
    place = models.CharField(max_length=20)
    article = models.CharField(max_length=20)
    weight = models.IntegerField(default=0)


class Label(models.Model):
    pallet = models.ForeignKey(Pallet, on_delete=models.CASCADE, related_name="labels")


class Truck(models.Model):
    pallets = models.ManyToManyField(Pallet)


class Region(models.Model):
    name = models.CharField(max_length=20, default="")


class Customer(models.Model):
    region = models.ForeignKey(Region, on_delete=models.CASCADE)


class Purchase(models.Model):
    customer = models.ForeignKey(Customer, null=True, on_delete=models.CASCADE)
    parcel = models.OneToOneField(Parcel, null=True, on_delete=models.CASCADE)
    gift = models.ForeignKey(GiftOrder, null=True, on_delete=models.CASCADE, related_name="+")
    orders = models.ManyToManyField(Order)
    letter = models.ForeignKey(RegisteredLetter, null=True, on_delete=models.CASCADE, related_name="+")
    total = models.IntegerField(default=0)


class Bytes(models.BinaryField):
    """A field that MariaDB takes for a key as well."""

    def db_type(self, connection: Any) -> str | None:
        return f"varbinary({self.max_length})" if connection.vendor == "mysql" else super().db_type(connection)


class Digest(models.Model):
    sum = Bytes(primary_key=True, max_length=20)


class Weight(models.Model):
    """A weight; its key is a number that can be written in several ways."""

    kilograms = models.DecimalField(primary_key=True, max_digits=8, decimal_places=2)
