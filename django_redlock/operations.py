"""
A migration operation that lets PostgreSQL itself refuse writes outside a fenced transaction.
"""

from dataclasses import dataclass
from string import Formatter
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.creation import TEST_DATABASE_PREFIX
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.db.models import AutoField, Model

from .conf import is_test_run
from .models import Fence, fence_key

TRIGGER = "redlock_require_fence_"  # and a number: the trigger with the greatest one counts

# Fields whose values PostgreSQL writes as Python does; others would give a name that no lock has.
WRITTEN_ALIKE = {
    *("AutoField", "BigAutoField", "SmallAutoField", "IntegerField", "BigIntegerField", "SmallIntegerField"),
    *("PositiveIntegerField", "PositiveBigIntegerField", "PositiveSmallIntegerField"),
    *("CharField", "TextField", "SlugField", "FilePathField", "UUIDField"),
}

# The claim itself leaves its keys in a setting that ends with the transaction, or with the savepoint of the claim. The
# function is in the schema of the fences, which may serve the tables of other schemas, too.
NOTE_CLAIM = """
CREATE OR REPLACE FUNCTION {schema}redlock_note_claim() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config(
        'redlock.claimed', coalesce(current_setting('redlock.claimed', true), '') || ' ' || NEW.key, true
    );
    RETURN NULL;
END $$
"""

# The arguments: the lock as it was written; "table", "row" or "new" (a row whose key is made for it); the key of the
# fence, or none for any fence; the id of the table; and for each part of a row's name a text, a column, the number of
# that column, and whether its value is escaped as lock_for_update() does. The number finds a column that was renamed,
# as long as the id is that of the table, which changes when the table is restored from a dump.
REQUIRE_FENCE = """
CREATE OR REPLACE FUNCTION redlock_require_fence() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    claimed text := coalesce(current_setting('redlock.claimed', true), '');
    known boolean;
    versions jsonb[] := '{{}}';
    version jsonb;
    field text;
    value text;
    name text;
    fence text;
    refusal text;
BEGIN
    IF TG_ARGV[1] = 'table' OR TG_LEVEL = 'STATEMENT' THEN
        IF claimed = '' OR position(TG_ARGV[2] IN claimed) = 0 THEN
            refusal := 'takes writes only in a transaction that has claimed its fence: with fenced(lease)';
        END IF;
    ELSE
        known := TG_RELID = TG_ARGV[3]::oid;
        IF NOT known THEN
            known := TG_ARGV[3]::oid IN (SELECT relid::oid FROM pg_partition_ancestors(TG_RELID) AS relid);
        END IF;
        IF TG_OP <> 'INSERT' THEN
            versions := versions || to_jsonb(OLD);
        END IF;
        IF TG_OP <> 'DELETE' THEN
            versions := versions || to_jsonb(NEW);
        END IF;
    END IF;
    FOREACH version IN ARRAY versions LOOP
        name := '';
        FOR part IN 1 .. TG_NARGS / 4 - 1 LOOP
            field := TG_ARGV[4 * part + 1];
            IF field = '' THEN
                value := '';
            ELSE
                IF known THEN
                    field := coalesce((
                        SELECT attname FROM pg_attribute
                        WHERE attrelid = TG_ARGV[3]::oid AND attnum = TG_ARGV[4 * part + 2]::int AND NOT attisdropped
                    ), field);
                END IF;
                value := version ->> field;
                IF TG_ARGV[4 * part + 3] <> '' THEN
                    value := replace(replace(value, '%', '%25'), ',', '%2C');
                END IF;
                IF value IS NULL THEN
                    refusal := format(
                        'takes no writes to this row, because column "%s" names its lock and is %s', field,
                        CASE WHEN version ? field THEN 'NULL'
                             ELSE 'gone: write RequireFence again in a migration, with the columns that there are' END
                    );
                END IF;
            END IF;
            name := name || TG_ARGV[4 * part] || value;
        END LOOP;
        fence := left(encode(sha256(convert_to(name, 'UTF8')), 'hex'), 32);
        IF position(fence IN claimed) = 0 THEN
            IF TG_OP <> 'INSERT' OR TG_ARGV[1] <> 'new' OR EXISTS (SELECT FROM {fences} WHERE key = fence) THEN
                refusal := format(
                    'takes writes to this row only in a transaction that has claimed the fence of "%s"', name
                );
            END IF;
        END IF;
    END LOOP;
    IF refusal IS NOT NULL AND NOT EXISTS (
        SELECT FROM pg_trigger
        WHERE tgrelid = TG_RELID AND tgname ~ '^redlock_require_fence_[0-9]+$' AND tgname > left(TG_NAME, 25)
    ) THEN
        RAISE EXCEPTION 'table % %', TG_TABLE_NAME, refusal USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
END $$
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A text in the name of a row's lock, and the column whose value follows."""

    text: str
    column: str = ""
    escaped: bool = False


class RequireFence(Operation):
    """
    Make PostgreSQL refuse writes to a table from a transaction that has not claimed its fence.

    Other databases are left as they are. The migration must come after ``("redlock", "0001_initial")``. A refused
    write raises Django's ``IntegrityError``. Of several operations for one model, the last one counts, and migrating
    back restores the operation before it.

    Args:
        model_name: The model whose table is protected.
        lock: Name of the lock whose fence is needed. Columns in braces require one fence per row:
            ``"model:shop.order:{pk}"`` is the lock of ``lock_for_update()``. Integers, text and UUIDs can be in a
            name. Empty means any fence.

    Raises:
        ValueError: When the migration runs: *lock* names a column that the table does not have, or whose values
            PostgreSQL writes in another way than Python.
    """

    reduces_to_sql = True
    reversible = True

    def __init__(self, model_name: str, lock: str = "") -> None:
        self.model_name = model_name
        self.lock = lock

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Change no model."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Install the triggers; those of an earlier operation stay for the way back, and no longer count."""
        model = to_state.apps.get_model(app_label, self.model_name)
        parts = self._parts(model)
        if self._applies(schema_editor, model):
            for statement in self._statements(schema_editor, model, parts):
                schema_editor.execute(statement, params=None)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Remove the triggers of this operation; the functions stay, because other tables may use them."""
        model = from_state.apps.get_model(app_label, self.model_name)
        if self._applies(schema_editor, model):
            for statement in self._reversal(schema_editor, model):
                schema_editor.execute(statement, params=None)

    def describe(self) -> str:
        """Describe the operation for ``migrate`` and ``sqlmigrate``."""
        return f"Require a fence for writes to {self.model_name}"

    @property
    def migration_name_fragment(self) -> str:
        """The operation's part of a migration's name."""
        return f"{self.model_name.lower()}_require_fence"

    def _applies(self, schema_editor: BaseDatabaseSchemaEditor, model: type[Model]) -> bool:
        connection = schema_editor.connection
        return connection.vendor == "postgresql" and self.allow_migrate_model(connection.alias, model)

    # The triggers

    def _statements(self, schema_editor: BaseDatabaseSchemaEditor, model: type[Model], parts: list[Part]) -> list[str]:
        table, fences = (schema_editor.quote_name(each._meta.db_table) for each in (model, Fence))
        installed = self._installed(schema_editor, model)
        number = installed[-1][0] + 1 if installed else 1  # also for the same lock again: its way back is a step, too
        arguments = ", ".join(map(schema_editor.quote_value, self._arguments(schema_editor, model, parts)))
        install = f"EXECUTE FUNCTION redlock_require_fence({arguments})"
        schema = self._schema(schema_editor, fences)
        statements = [
            NOTE_CLAIM.format(schema=schema),
            REQUIRE_FENCE.format(fences=fences),
            f"DROP TRIGGER IF EXISTS redlock_note_claim ON {fences}",
            f"CREATE TRIGGER redlock_note_claim AFTER UPDATE OF token, owner ON {fences} "
            f"FOR EACH ROW EXECUTE FUNCTION {schema}redlock_note_claim()",
            *(self._switch(schema_editor, model, "DISABLE", earlier) for earlier, _ in installed),
            *self._removal(schema_editor, model, number),
            # For each row, because PostgreSQL gives the partitions of a table only such triggers.
            f"CREATE TRIGGER {TRIGGER}{number:03} BEFORE INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW {install}",
        ]
        if not is_test_database(schema_editor.connection):
            statements.append(
                f"CREATE TRIGGER {TRIGGER}{number:03}_truncate BEFORE TRUNCATE ON {table} FOR EACH STATEMENT {install}"
            )
        return statements

    @staticmethod
    def _schema(schema_editor: BaseDatabaseSchemaEditor, table: str) -> str:
        """Return the schema of a table with a dot; empty if there is no table, because of sqlmigrate."""
        with schema_editor.connection.cursor() as cursor:
            cursor.execute("SELECT relnamespace::regnamespace FROM pg_class WHERE oid = to_regclass(%s)", [table])
            found = cursor.fetchone()
        return f"{found[0]}." if found else ""

    def _removal(self, schema_editor: BaseDatabaseSchemaEditor, model: type[Model], number: int) -> list[str]:
        table = schema_editor.quote_name(model._meta.db_table)
        return [f"DROP TRIGGER IF EXISTS {TRIGGER}{number:03}{of} ON {table}" for of in ("", "_truncate")]

    def _reversal(self, schema_editor: BaseDatabaseSchemaEditor, model: type[Model]) -> list[str]:
        installed = self._installed(schema_editor, model)
        numbers = [number for number, lock in installed if lock == self.lock]
        if not numbers:
            return []
        rest = [number for number, _ in installed if number != numbers[-1]]
        again = [self._switch(schema_editor, model, "ENABLE", rest[-1])] if rest else []
        return [*self._removal(schema_editor, model, numbers[-1]), *again]

    def _switch(self, schema_editor: BaseDatabaseSchemaEditor, model: type[Model], how: str, number: int) -> str:
        # Only to save time: if somebody enables all triggers, those with a smaller number still refuse nothing.
        return f"ALTER TABLE {schema_editor.quote_name(model._meta.db_table)} {how} TRIGGER {TRIGGER}{number:03}"

    def _installed(self, schema_editor: BaseDatabaseSchemaEditor, model: type[Model]) -> list[tuple[int, str]]:
        """Return the numbers and locks of the triggers that the table has, the one that counts last."""
        with schema_editor.connection.cursor() as cursor:
            cursor.execute(
                "SELECT right(tgname, 3)::int, tgargs FROM pg_trigger "
                f"WHERE tgrelid = to_regclass(%s) AND tgname ~ '^{TRIGGER}[0-9]+$' ORDER BY tgname",
                [schema_editor.quote_name(model._meta.db_table)],
            )
            return [(number, bytes(arguments).split(b"\0")[0].decode()) for number, arguments in cursor.fetchall()]

    def _arguments(self, schema_editor: BaseDatabaseSchemaEditor, model: type[Model], parts: list[Part]) -> list[str]:
        with schema_editor.connection.cursor() as cursor:
            cursor.execute(
                "SELECT attrelid, attname, attnum FROM pg_attribute WHERE attrelid = to_regclass(%s)",
                [schema_editor.quote_name(model._meta.db_table)],
            )
            found = cursor.fetchall()
        numbers = {name: str(number) for _, name, number in found}
        table = str(found[0][0]) if found else "0"  # sqlmigrate may come before the table
        if not parts:
            return [self.lock, "table", fence_key(self.lock) if self.lock else "", table]
        arguments = [self.lock, "new" if self._makes_key(model, parts) else "row", "", table]
        for part in parts:
            arguments += [part.text, part.column, numbers.get(part.column, "0"), "escaped" if part.escaped else ""]
        return arguments

    # The name of the lock

    def _parts(self, model: type[Model]) -> list[Part]:
        """
        Return the parts of the name of a row's lock; none if all rows have the same lock.

        Raises:
            ValueError: The rows could never be written, because nobody can hold the lock.
        """
        options = model._meta
        lock = self.lock
        if len(options.pk_fields) > 1 and lock.startswith(f"model:{options.label_lower}:"):
            lock = lock.replace(",".join(f"{{{field.name}}}" for field in options.pk_fields), "{pk}")
        parts: list[Part] = []
        text = ""
        try:
            parsed = list(Formatter().parse(lock))
        except ValueError as error:
            raise self._refusal(model, f"it is no format string ({error})") from None
        for before, name, spec, conversion in parsed:
            text += before  # a literal brace splits a text
            if name is None:
                continue
            if spec or conversion:
                raise self._refusal(model, f"{name!r} has a conversion or a format, which PostgreSQL does not know")
            fields = options.pk_fields if name == "pk" else [self._field(model, name)]
            for field in fields:
                self._check(model, field)
                parts.append(Part(text, str(field.column), escaped=len(fields) > 1))
                text = ","
            text = ""
        return [*parts, Part(text)] if parts else []

    def _field(self, model: type[Model], name: str) -> Any:
        known = {key: field for field in model._meta.concrete_fields for key in (field.name, field.attname)}
        if name not in known:
            columns = ", ".join(field.name for field in model._meta.concrete_fields)
            raise self._refusal(model, f"the model has no column {name!r}; it has {columns}")
        return known[name]

    def _check(self, model: type[Model], field: Any) -> None:
        concrete = model._meta.concrete_model or model
        if field.model._meta.concrete_model is not concrete:
            raise self._refusal(
                model,
                f"{field.name!r} is in the table of {field.model._meta.object_name}; write '{{pk}}', or protect the "
                "table of that model",
            )
        target = field
        while target.remote_field:
            target = target.target_field
        if target.get_internal_type() not in WRITTEN_ALIKE:
            raise self._refusal(
                model,
                f"{field.name!r} is a {target.get_internal_type()}, which PostgreSQL and Python write in different "
                "ways; integers, text and UUIDs can be in the name of a lock",
            )

    def _refusal(self, model: type[Model], why: str) -> ValueError:
        return ValueError(f"RequireFence({self.model_name!r}, lock={self.lock!r}) would refuse every write: {why}.")

    @staticmethod
    def _makes_key(model: type[Model], parts: list[Part]) -> bool:
        """Return whether the name has the whole primary key, and the key of a new row is made for it."""
        columns = {part.column for part in parts}
        keys = model._meta.pk_fields
        return all(key.column in columns for key in keys) and any(map(is_made, keys))


def is_made(key: Any) -> bool:
    """Return whether Django or the database makes the value of a key, so that nobody has a lock on it before."""
    while key.remote_field and getattr(key.remote_field, "parent_link", False):
        key = key.target_field
    return isinstance(key, AutoField) or key.has_db_default() or (key.has_default() and callable(key.default))


def is_test_database(connection: BaseDatabaseWrapper) -> bool:
    """
    Return whether Django's tests are running and this is a database that they made.

    ``TransactionTestCase`` empties all tables with TRUNCATE after each test. Both conditions are needed: no process
    that serves a project has the first, and no other database of a process that runs tests has the second.
    """
    settings = connection.settings_dict
    name = str(settings["NAME"])
    is_named = name == settings["TEST"]["NAME"] or name.startswith(TEST_DATABASE_PREFIX)
    return is_named and is_test_run()
