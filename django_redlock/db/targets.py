"""
Find the rows to lock, name their locks, and read the rows again once they are locked (internal).

There are two kinds of target: the rows that a queryset selects (:class:`Rows`), and the caller's instances
(:class:`Instances`). Both have the same three methods: ``rows()`` finds the rows before they are locked, ``again()``
finds which of them are still there afterwards, and ``read()`` reads them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from django.core.exceptions import FieldDoesNotExist
from django.db import DEFAULT_DB_ALIAS, router
from django.db.models import Model, QuerySet

from ..keys.text import decimal_text

MAX_ROWS = 200  # rows in one lock


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A row to lock: its primary key, the lock names that stand for it, and its identity among instances."""

    pk: Any
    names: frozenset[str]
    key: str = ""


class Related:
    """
    The related rows to lock together with a row, as named by ``of=``.

    Args:
        of: Paths of foreign keys such as ``"customer"`` or ``"customer__region"``, as for ``select_related()``;
            ``"self"`` is the row itself, which is always locked.

    Raises:
        TypeError: *of* is not a tuple or list of str.
    """

    def __init__(self, of: Sequence[str]) -> None:
        if isinstance(of, str):
            raise TypeError(f"of must be a tuple or list such as ({of!r},), not the str {of!r}.")
        if not isinstance(of, Sequence) or not all(isinstance(path, str) for path in of):
            raise TypeError(f"of must be a tuple or list such as ('customer',), not {of!r}.")
        self._paths = [path for path in of if path != "self"]

    def __bool__(self) -> bool:
        return bool(self._paths)

    def keys(self, model: type[Model]) -> list[tuple[type[Model], str]]:
        """
        Return the root models of *model* and of its related rows, each with the path of its primary key.

        Raises:
            ValueError: A path does not lead to a single row.
        """
        found = _roots(model)
        for path in self._paths:
            found += [(root, f"{path}__{field}") for root, field in _roots(_follow(model, path))]
        return found

    def rows(self, queryset: QuerySet[Any]) -> list[ModelRow]:
        """Return the distinct rows of a queryset, at most one more than a lock can have."""
        keys = self.keys(queryset.model)
        fields = list(dict.fromkeys(["pk", *(field for _, field in keys)]))  # Django 5.2.0 returns a repeated one once
        query = queryset.prefetch_related(None).values_list(*fields)
        query.query.select_for_update = False  # of rows that are not read here, or without a transaction
        first = list(query[: MAX_ROWS + 1])
        repeated = len(first) > MAX_ROWS >= len({pk for pk, *_ in first})  # by a join, so that others may follow
        names: dict[Any, set[str]] = {}
        for values in query.iterator() if repeated else first:
            found = dict(zip(fields, values, strict=True))
            known = names.setdefault(found["pk"], set())
            known.update(_name(root, found[field]) for root, field in keys if None not in _parts(found[field]))
            if len(names) > MAX_ROWS:
                break
        return [ModelRow(pk, frozenset(each)) for pk, each in names.items()]


class Rows:
    """The rows that a queryset selects."""

    def __init__(self, queryset: QuerySet[Any], related: Related) -> None:
        if not isinstance(queryset, QuerySet):
            given = type(queryset).__name__
            if isinstance(queryset, type):
                given = f"the class {queryset.__name__}; write {queryset.__name__}.objects.all()"
            raise TypeError(
                f"lock_for_update() needs a model instance, a list of instances or a queryset, not {given}."
            )
        if queryset._fields is not None:  # type: ignore[attr-defined]
            raise TypeError(
                "lock_for_update() needs a queryset of instances; leave out values(), values_list() and dates(), and "
                "take the values from the rows inside the block."
            )
        if queryset.query.combinator:
            raise TypeError(
                "lock_for_update() cannot read the rows of union(), intersection() or difference() again; combine the "
                "conditions with Q objects."
            )
        query = queryset.query
        if query.where.contains_over_clause or any(each.contains_over_clause for each in query.annotations.values()):
            raise TypeError(
                "lock_for_update() reads the locked rows again, without the others that a window function looks at; "
                "choose the rows by their primary keys, with filter(pk__in=[...])."
            )
        related.keys(queryset.model)
        queryset = queryset.all()
        queryset._for_write = True  # type: ignore[attr-defined]  # like select_for_update(): a replica may lag
        self._queryset = queryset
        self.related = related
        self.db = queryset.db
        self.label = queryset.model._meta.label

    def rows(self) -> list[ModelRow]:
        """
        Find the rows.

        Raises:
            ValueError: There are more rows than one lock can have.
        """
        rows = self.related.rows(self._queryset.using(self.db))
        check_number(rows, self.label)
        return rows

    def again(self, rows: list[ModelRow]) -> list[ModelRow]:
        """Find the rows that still match the queryset."""
        return self.related.rows(self._still(rows))

    def read(self, rows: list[ModelRow]) -> list[Any]:
        """Return the rows that still match the queryset, in its order."""
        return list(self._still(rows))

    def _still(self, rows: list[ModelRow]) -> QuerySet[Any]:
        again = self._queryset.using(self.db)
        again.query.clear_limits()  # a slice cannot be filtered; the primary keys stand for it
        return again.filter(pk__in=[row.pk for row in rows])


class Instances:
    """
    The rows of the caller's instances, which may be of several models but share one database.

    Args:
        instances: The instances.
        related: The related rows to lock as well.
        single: Whether there is one instance, which the caller gets as it is, not in a list.
    """

    def __init__(self, instances: Sequence[Model], related: Related, single: bool = False) -> None:
        for instance in instances:
            if not isinstance(instance, Model):
                raise TypeError(f"lock_for_update() of a list needs model instances, not {type(instance).__name__}.")
            if instance._state.adding or None in _parts(instance.pk):
                raise ValueError(
                    f"This {instance._meta.label} is not saved, so it has no row to lock. Save it first; no other "
                    "process can know it before."
                )
            related.keys(model_of(instance))
        aliases = {router.db_for_write(model_of(instance), instance=instance) for instance in instances}
        if len(aliases) > 1:
            raise ValueError(
                f"The instances are in several databases ({', '.join(sorted(aliases))}), which have a transaction "
                "each. Lock them in one block per database, and always in the same order."
            )
        self._instances = instances
        self.single = single
        self.related = related
        self.db = aliases.pop() if aliases else DEFAULT_DB_ALIAS
        self.label = ", ".join(dict.fromkeys(instance._meta.label for instance in instances)) or "nothing"
        check_number(instances, self.label)

    def rows(self) -> list[ModelRow]:
        """Name the rows; query the database only if related rows are locked, too."""
        found: dict[str, frozenset[str]] = {}
        for model, some in self._by_model() if self.related else ():
            related = self.related.rows(_fetch(model, self.db, some))
            found |= {_identity_of(model, row.pk): row.names for row in related}
        rows = {row.key: row for row in map(_row, self._instances)}
        return [replace(row, names=row.names | found.get(key, frozenset())) for key, row in rows.items()]

    def again(self, rows: list[ModelRow]) -> list[ModelRow]:
        """Name these rows again, because their related rows may have changed."""
        keys = {row.key for row in rows}
        return [row for row in self.rows() if row.key in keys]

    def read(self, rows: list[ModelRow]) -> Any:
        """
        Refresh and return the instances of *rows*, with one query per model, or by their own ``refresh_from_db()``.

        Raises:
            DoesNotExist: One of the rows is gone.
        """
        chosen = {row.key for row in rows}
        for model, some in self._by_model():
            wanted = [instance for instance in some if _identity(instance) in chosen]
            # A mixin may keep there what it has to know of the row, such as which fields have changed since.
            if len(self._instances) == 1 or model.refresh_from_db is not Model.refresh_from_db:
                for instance in wanted:
                    instance.refresh_from_db(using=self.db)
                continue
            fresh = {_identity(found): found for found in _fetch(model, self.db, wanted)}
            for instance in wanted:
                if _identity(instance) not in fresh:
                    raise model.DoesNotExist(  # type: ignore[attr-defined]
                        f"{model._meta.label} {instance.pk} is gone."
                    )
                _refresh(instance, fresh[_identity(instance)])
        found = [instance for instance in self._instances if _identity(instance) in chosen]
        return found[0] if self.single else found

    def _by_model(self) -> list[tuple[type[Model], list[Any]]]:
        models: dict[type[Model], list[Any]] = {}
        for instance in self._instances:
            models.setdefault(model_of(instance), []).append(instance)
        return list(models.items())


Target = Rows | Instances


def check_number(rows: Sequence[object], label: str) -> None:
    """
    Make sure that the rows are few enough for one lock.

    Raises:
        ValueError: There are too many rows.
    """
    if len(rows) > MAX_ROWS:
        raise ValueError(
            f"There are more than {MAX_ROWS} rows of {label}, the most that one lock can have. Lock slices of them, or "
            f"one name for all of them: with lock('{label.lower()}:all')."
        )


def model_of(instance: Model) -> type[Model]:
    """Return the model of an instance; type() would not look into a lazy object, such as ``request.user``."""
    return instance.__class__


def _fetch(model: type[Model], db: str, instances: Iterable[Model]) -> QuerySet[Any]:
    return model._base_manager.using(db).filter(pk__in=[instance.pk for instance in instances])


def _refresh(instance: Model, fresh: Model) -> None:
    """Do what ``refresh_from_db()`` does, with a row that has already been read."""
    for field in instance._meta.concrete_fields:
        setattr(instance, field.attname, getattr(fresh, field.attname))
    for relation in (*instance._meta.fields, *instance._meta.related_objects, *instance._meta.private_fields):
        if getattr(relation, "is_relation", False) and relation.is_cached(instance):
            relation.delete_cached_value(instance)
    instance._prefetched_objects_cache = {}  # type: ignore[attr-defined]
    instance._state.db = fresh._state.db


# Names


def _row(instance: Model) -> ModelRow:
    roots = _roots(model_of(instance))
    names = frozenset(_name(root, getattr(instance, field)) for root, field in roots)
    return ModelRow(instance.pk, names, _identity(instance))


def _identity(instance: Model) -> str:
    return _identity_of(model_of(instance), instance.pk)


def _identity_of(model: type[Model], pk: object) -> str:
    """Return a name that does not depend on how a row's key is written, but differs for a parent and its child."""
    concrete = model._meta.concrete_model or model
    return _name(concrete, pk)


def _follow(model: type[Model], path: str) -> type[Model]:
    """Return the model at the end of a path of foreign keys."""
    for name in path.split("__"):
        try:
            field = model._meta.get_field(name)
        except FieldDoesNotExist:
            known = sorted(each.name for each in model._meta.get_fields() if _single(each))
            raise ValueError(
                f"of={path!r}: {model._meta.label} has no {name!r}; it has {', '.join(known) or 'no relation'}."
            ) from None
        if not _single(field):
            raise ValueError(f"of={path!r}: {model._meta.label}.{name} is not a relation to one row.")
        model = field.related_model  # type: ignore[assignment]
    return model


def _single(field: Any) -> bool:
    return bool((field.many_to_one or field.one_to_one) and field.related_model)


def _parts(pk: object) -> tuple[object, ...]:
    return pk if isinstance(pk, tuple) else (pk,)


def _roots(model: type[Model]) -> list[tuple[type[Model], str]]:
    """
    Return the root models of *model*, each with the field of *model* that holds its primary key.

    A proxy counts as its concrete model, and a row of a child is also a row of its parents. There are several roots
    only when a model inherits the tables of several models.
    """
    concrete = model._meta.concrete_model or model
    return list(dict(_links(concrete)).items()) or [(concrete, "pk")]


def _links(concrete: type[Model]) -> Iterator[tuple[type[Model], str]]:
    for parent, link in concrete._meta.parents.items():
        if parent._meta.parents:
            yield from _links(parent)
        elif link:
            yield parent, link.attname


def _name(root: type[Model], key: object) -> str:
    """Return the lock name of a row: the same in every process, however the row's key is written."""
    fields = root._meta.pk_fields
    texts = [_plain(field.to_python(part)) for field, part in zip(fields, _parts(key), strict=True)]
    if len(texts) > 1:
        texts = [text.replace("%", "%25").replace(",", "%2C") for text in texts]
    return f"model:{root._meta.label_lower}:{','.join(texts)}"


def _plain(value: Any) -> str:
    """Return a key as text, the same text for equal values."""
    match value:
        case str():
            return str.__str__(value)  # a member of TextChoices counts as its value
        case datetime() if value.tzinfo:
            return value.astimezone(UTC).isoformat()
        case Decimal():
            return decimal_text(value)
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
        case _:
            return str(value)
