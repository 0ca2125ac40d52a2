"""The heap of changing keys against a sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from pdrouter.core.heap import ChangingHeap, Entry


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "put", "move", "drop"]), st.integers(0, 20), st.integers(0, 30)), max_size=200
    )
)
def test_entries_come_by_key_and_age(steps: list[tuple[str, int, int]]) -> None:
    """Whatever is put, dropped and changed, live entries come by key, equal keys in the order of their putting."""
    heap: ChangingHeap[int] = ChangingHeap()
    live: dict[int, tuple[int, int, Entry[int]]] = {}
    for age, (step, key, item) in enumerate(steps):
        if step == "drop" and item in live:
            heap.drop(live[item][2])
            assert not live.pop(item)[2].is_live
        elif step == "move" and item in live:
            live[item] = (key, age, heap.move(live[item][2], key))
        elif step == "put" and item not in live:
            live[item] = (key, age, heap.put(key, item))
    assert [e.item for e in heap.in_order()] == [e.item for _, _, e in sorted(live.values(), key=lambda v: v[:2])]
    assert len(heap) == len(live)
    for item, (_, _, entry) in live.items():
        assert (entry.is_live, entry.item) == (True, item)
    if live:
        assert heap.top() is next(heap.in_order())


def test_an_entry_is_dropped_once() -> None:
    """Twice counts once."""
    heap: ChangingHeap[str] = ChangingHeap()
    entry = heap.put(1.0, "a")
    heap.put(2.0, "b")
    heap.drop(entry)
    heap.drop(entry)
    assert [e.item for e in heap.in_order()] == ["b"]


def test_what_is_left_behind_is_bounded() -> None:
    """A key that only rises leaves no more entries behind than there are live ones, and a few."""
    heap: ChangingHeap[int] = ChangingHeap()
    entries = {n: heap.put(n, n) for n in range(100)}
    for round_ in range(1, 200):
        for n, entry in entries.items():
            heap.move(entry, n + round_ * (n % 7))
            assert heap.left_behind <= 100 + 64
    for entry in list(entries.values())[10:]:
        heap.drop(entry)
        assert heap.left_behind <= len(heap) + 64
    assert len(heap) == 10
