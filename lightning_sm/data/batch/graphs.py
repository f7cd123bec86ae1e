"""Graphs of ``torch_geometric``: ``Data``, ``HeteroData``, ``TemporalData``, their subclasses, and batches of them.

A graph keeps its values in stores, which refer to the graph. Only what the stores hold is sent, and the graph's class;
the library makes new stores. No code of a subclass sees anything that a message says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_sm.data.batch.class_names import class_name, find_class

_GRAPH = "torch_geometric.data.data:BaseData"
_BATCH = "torch_geometric.data.batch:Batch"
_NAME_OF_BATCH = re.compile(r"([^\[\]]+)\[([^\[\]]+)\]")
_STORES = ("_store", "_global_store", "_node_store_dict", "_edge_store_dict")
# The library's __init__ sets these to classes.
_SET_BY_LIBRARY = (*_STORES, "_edge_attr_cls", "_tensor_attr_cls")
_OF_STORE = ("_mapping", "_parent", "_key", "_cached_attr")


def name_of_graph(graph: Any) -> str | None:
    """Return a name for the class of a graph, or None for any other object.

    The library makes the class of a batch at run time, of a batch class and the class of its graphs, inside a function
    of the module ``abc``: no other process finds it by name. Its name is that of both: ``batch class[graph class]``.
    """
    library = find_class(_GRAPH)
    if library is None or not isinstance(graph, library):
        return None
    cls, batch = type(graph), find_class(_BATCH)
    if batch is None or not isinstance(graph, batch) or find_class(class_name(cls)) is cls:
        return class_name(cls)
    return f"{class_name(cls.__bases__[0])}[{class_name(cls.__bases__[-1])}]"


def graph_maker(name: str) -> Callable[[Any], Any] | None:
    """Return what makes a graph of its parts, or None if this process has not imported what a name of a graph names."""
    if (library := find_class(_GRAPH)) is None:
        return None
    of_batch = _NAME_OF_BATCH.fullmatch(name)
    cls = find_class(of_batch[2] if of_batch else name)
    if cls is None or not issubclass(cls, library):
        return None
    if of_batch is None:
        return partial(_graph_from_parts, cls)
    known, batch = find_class(_BATCH), find_class(of_batch[1])
    if known is None or batch is None or not issubclass(batch, known):
        return None
    return lambda parts: _graph_from_parts(_class_of_batch(batch, cls), parts)


def _class_of_batch(batch: Any, cls: type) -> type:
    # The library's own way, also when it unpickles a batch. It makes an empty graph of the class, too.
    made = _classes_of_batches.get((batch, cls)) or type(batch(_base_cls=cls))
    if made.__bases__[-1] is not cls:
        raise TypeError(f"{made.__name__} holds {class_name(made.__bases__[-1])} here. Give one of them another name.")
    _classes_of_batches[batch, cls] = made
    return made


_classes_of_batches: dict[tuple[type, type], type] = {}


def graph_parts(graph: Any) -> dict[str, Any]:
    """Return the values of a graph in plain containers."""
    attributes = dict(vars(graph))
    parts: dict[str, Any] = {}
    for name in ("_store", "_global_store"):
        if name in attributes:
            parts["store"] = _store_parts(attributes[name])
    for name, kind in (("_node_store_dict", "nodes"), ("_edge_store_dict", "edges")):
        if name in attributes:
            parts[kind] = {key: _store_parts(store) for key, store in attributes[name].items()}
    parts["attributes"] = {name: value for name, value in attributes.items() if name not in _SET_BY_LIBRARY}
    return parts


def _graph_from_parts(cls: Any, parts: Any) -> Any:
    known: Any = find_class(_GRAPH)
    library: Any = next(
        parent
        for parent in cls.__mro__
        if issubclass(parent, known) and parent.__module__.startswith("torch_geometric.data.")
    )
    graph = object.__new__(cls)
    library.__init__(graph)
    attributes = vars(graph)
    _check_names(parts["attributes"], _SET_BY_LIBRARY)
    attributes.update(parts["attributes"])
    _fill(attributes["_store" if "_store" in attributes else "_global_store"], parts["store"])
    for key, values in parts.get("nodes", {}).items():
        _fill(library.get_node_store(graph, key), values)
    for key, values in parts.get("edges", {}).items():
        _fill(library.get_edge_store(graph, *key), values)
    return graph


def _store_parts(store: Any) -> list[dict[str, Any]]:
    return [dict(store._mapping), {name: value for name, value in vars(store).items() if name not in _OF_STORE}]


def _fill(store: Any, parts: Any) -> None:
    mapping, attributes = parts
    _check_names(mapping, ())
    _check_names(attributes, _OF_STORE)
    vars(store)["_mapping"].update(mapping)
    vars(store).update(attributes)


def _check_names(values: Any, reserved: tuple[str, ...]) -> None:
    if type(values) is not dict or not all(type(name) is str and name not in reserved for name in values):
        raise ValueError("the attributes of a graph are not named values")
