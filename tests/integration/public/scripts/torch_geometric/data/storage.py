"""Stores: mappings with a weak reference to their graph, and private attributes."""

import weakref
from collections.abc import MutableMapping


class BaseStorage(MutableMapping):
    def __init__(self, _mapping=None, **options):
        self.__dict__["_mapping"] = {}
        for key, value in {**(_mapping or {}), **options}.items():
            setattr(self, key, value)

    def __getstate__(self):
        parent = self.__dict__.get("_parent")
        return self.__dict__ if parent is None else {**self.__dict__, "_parent": parent()}

    def __setstate__(self, state):
        self.__dict__.update(state)
        if "_parent" in state:
            self._parent = state["_parent"]

    def __getattr__(self, key):
        try:
            return self.__dict__["_mapping"][key]
        except KeyError:
            raise AttributeError(key) from None

    def __setattr__(self, key, value):
        if key == "_parent":
            self.__dict__[key] = weakref.ref(value)
        elif key.startswith("_"):
            self.__dict__[key] = value
        else:
            self[key] = value

    def __getitem__(self, key):
        return self._mapping[key]

    def __setitem__(self, key, value):
        self.__dict__.setdefault("_cached_attr", {}).setdefault("node", set()).add(key)
        if value is not None:
            self._mapping[key] = value

    def __delitem__(self, key):
        del self._mapping[key]

    def __iter__(self):
        return iter(self._mapping)

    def __len__(self):
        return len(self._mapping)


class NodeStorage(BaseStorage):
    @property
    def num_nodes(self):
        return len(self["x"])


class EdgeStorage(BaseStorage):
    @property
    def num_edges(self):
        return self["edge_index"].shape[1]


class GlobalStorage(NodeStorage, EdgeStorage):
    pass
