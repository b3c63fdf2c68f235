"""A store whose names have every character that some client takes for a pattern or a part of a url."""

from __future__ import annotations

from spark_elastic.data.store import Store

# Each matches "ax" as a pattern of a shell, or ends a path where it is parsed as a url.
NAMES: tuple[str, ...] = ("a[xy]", "a*", "a?", "[!b]x", "**", "{ax,bx}", "a\\x", "a%78")
NAMES += ("a#x", "a;x", "a x", "~a", "a+&=$'\"x", "ä")


def check_special_names(store: Store) -> None:
    """Every call reaches what it names, and nothing else."""
    everything = {f"runs/{name}/b/{other}" for name in (*NAMES, "ax", "axy") for other in ("one", "two")}
    for name in sorted(everything):
        store.write_bytes(name, name.encode())
        store.write_bytes(name, name.encode())
    for folder in NAMES:
        first, second, new = (f"runs/{folder}/{name}" for name in ("b/one", "b/two", "new"))
        assert store.read_bytes(first) == first.encode()
        assert store.read_tail(first, 3) == b"one"
        with store.open_read(first) as file:
            assert file.read() == first.encode()
        assert store.exists(first)
        assert store.describe(first).bytes == len(first.encode())
        assert store.list(f"runs/{folder}/b") == [first, second]
        assert store.create_exclusive(new, b"1")
        assert not store.create_exclusive(new, b"2")
        assert [each.name for each in store.find(f"runs/{folder}")] == [first, second, new]
        store.remove_tree(new)
        store.delete(first)
        assert {each.name for each in store.find()} == everything - {first}
        store.remove_tree(f"runs/{folder}")
        everything -= {first, second}
        assert {each.name for each in store.find()} == everything
        assert not store.exists(f"runs/{folder}")
    assert store.list("runs") == ["runs/ax", "runs/axy"]
