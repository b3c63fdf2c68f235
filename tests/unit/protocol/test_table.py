from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.protocol.types import Table


@given(st.lists(st.tuples(st.integers(0, 40), st.one_of(st.none(), st.integers())), max_size=120))
def test_a_table_is_a_dict_and_never_changes(changes: list[tuple[int, int | None]]) -> None:
    table: Table[int, int] = Table()
    model: dict[int, int] = {}
    for key, value in changes:
        before, frozen = dict(table), table
        if value is None:
            table = table.drop(key)
            model.pop(key, None)
        else:
            table = table.put(key, value)
            model[key] = value
        assert dict(frozen) == before
        assert dict(table) == model
        assert len(table) == len(model)
        assert [k for k in range(41) if k in table] == sorted(model)


def test_none_is_a_value_like_any_other() -> None:
    table: Table[str, None] = Table[str, None]().put("a", None)
    assert "a" in table
    assert list(table.drop("a")) == []
