"""
A migration operation that lets PostgreSQL itself refuse writes outside a fenced transaction.
"""

from string import Formatter
from typing import Any

from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.db.models import Model

from .models import Fence, fence_key

TRIGGER = "redlock_require_fence"

# The claim itself leaves its keys in a setting that ends with the transaction, or with the savepoint of the claim.
NOTE_CLAIM = """
CREATE OR REPLACE FUNCTION redlock_note_claim() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config(
        'redlock.claimed', coalesce(current_setting('redlock.claimed', true), '') || ' ' || NEW.key, true
    );
    RETURN NULL;
END $$
"""

# The arguments: none for any fence; one key; or the parts of a name, text and column in turn, for a fence per row.
REQUIRE_FENCE = """
CREATE OR REPLACE FUNCTION redlock_require_fence() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    claimed text := coalesce(current_setting('redlock.claimed', true), '');
    versions jsonb[] := '{}';
    version jsonb;
    name text;
BEGIN
    IF TG_LEVEL = 'STATEMENT' THEN
        IF claimed = '' OR (TG_NARGS = 1 AND position(TG_ARGV[0] IN claimed) = 0) THEN
            RAISE EXCEPTION 'table % takes writes only in a transaction that has claimed its fence: with fenced(lease)',
                TG_TABLE_NAME USING ERRCODE = 'integrity_constraint_violation';
        END IF;
        RETURN NULL;
    END IF;
    IF TG_OP <> 'INSERT' THEN
        versions := versions || to_jsonb(OLD);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        versions := versions || to_jsonb(NEW);
    END IF;
    FOREACH version IN ARRAY versions LOOP
        name := '';
        FOR part IN 0 .. TG_NARGS - 1 LOOP
            name := name || CASE WHEN part % 2 = 0 THEN TG_ARGV[part] ELSE version ->> TG_ARGV[part] END;
        END LOOP;
        IF coalesce(position(left(encode(sha256(convert_to(name, 'UTF8')), 'hex'), 32) IN claimed), 0) = 0 THEN
            RAISE EXCEPTION 'table % takes writes to this row only in a transaction that has claimed the fence of "%"',
                TG_TABLE_NAME, name USING ERRCODE = 'integrity_constraint_violation';
        END IF;
    END LOOP;
    RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
END $$
"""


class RequireFence(Operation):
    """
    Make PostgreSQL refuse writes to a table from a transaction that has not claimed its fence.

    Other databases are left as they are. The migration must come after ``("redlock", "0001_initial")``. A refused
    write raises Django's ``IntegrityError``.

    Args:
        model_name: The model whose table is protected.
        lock: Name of the lock whose fence is needed. Columns in braces require one fence per row:
            ``"model:shop.order:{id}"`` is the lock of ``lock_for_update()``. Integers, text and UUIDs can be in a
            name. Empty means any fence.
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
        """Install the triggers."""
        model = to_state.apps.get_model(app_label, self.model_name)
        if self._applies(schema_editor, model):
            for statement in self._statements(schema_editor, model):
                schema_editor.execute(statement, params=None)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Remove the triggers of this table; the functions stay, because other tables may use them."""
        model = from_state.apps.get_model(app_label, self.model_name)
        if self._applies(schema_editor, model):
            for statement in self._removal(schema_editor, model):
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

    def _statements(self, schema_editor: BaseDatabaseSchemaEditor, model: type[Model]) -> list[str]:
        table, fences = (schema_editor.quote_name(each._meta.db_table) for each in (model, Fence))
        arguments = ", ".join(schema_editor.quote_value(part) for part in self._arguments(model))
        level, truncate = ("ROW", "") if self._per_row() else ("STATEMENT", " OR TRUNCATE")
        statements = [
            NOTE_CLAIM,
            REQUIRE_FENCE,
            f"DROP TRIGGER IF EXISTS redlock_note_claim ON {fences}",
            f"CREATE TRIGGER redlock_note_claim AFTER UPDATE OF token, owner ON {fences} "
            "FOR EACH ROW EXECUTE FUNCTION redlock_note_claim()",
            *self._removal(schema_editor, model),
            f"CREATE TRIGGER {TRIGGER} BEFORE INSERT OR UPDATE OR DELETE{truncate} ON {table} "
            f"FOR EACH {level} EXECUTE FUNCTION redlock_require_fence({arguments})",
        ]
        if self._per_row():
            statements.append(
                f"CREATE TRIGGER {TRIGGER}_truncate BEFORE TRUNCATE ON {table} "
                "FOR EACH STATEMENT EXECUTE FUNCTION redlock_require_fence()"
            )
        return statements

    def _removal(self, schema_editor: BaseDatabaseSchemaEditor, model: type[Model]) -> list[str]:
        table = schema_editor.quote_name(model._meta.db_table)
        return [f"DROP TRIGGER IF EXISTS {name} ON {table}" for name in (TRIGGER, f"{TRIGGER}_truncate")]

    def _per_row(self) -> bool:
        return any(field is not None for _, field, *_ in Formatter().parse(self.lock))

    def _arguments(self, model: type[Model]) -> list[str]:
        if not self._per_row():
            return [fence_key(self.lock)] if self.lock else []
        parts = [""]
        for text, field, *_ in Formatter().parse(self.lock):
            parts[-1] += text  # a literal brace splits a text
            if field is not None:
                found: Any = model._meta.pk if field == "pk" else model._meta.get_field(field)
                parts += [str(found.column), ""]
        return parts
