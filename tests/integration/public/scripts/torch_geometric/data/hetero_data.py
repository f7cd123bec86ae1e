from torch_geometric.data.data import BaseData, FeatureStore, TensorAttr
from torch_geometric.data.storage import BaseStorage, EdgeStorage, NodeStorage


class HeteroData(BaseData, FeatureStore):
    def __init__(self, _mapping=None):
        super().__init__(TensorAttr)
        self.__dict__["_global_store"] = BaseStorage(_parent=self)
        self.__dict__["_node_store_dict"] = {}
        self.__dict__["_edge_store_dict"] = {}

    def __getattr__(self, key):
        return getattr(self.__dict__["_global_store"], key)

    def __setattr__(self, key, value):
        if key in self._node_store_dict:
            raise AttributeError(f"'{key}' is already present as a node type")
        setattr(self._global_store, key, value)

    def __getitem__(self, key):
        return self.get_edge_store(*key) if isinstance(key, tuple) else self.get_node_store(key)

    def get_node_store(self, key):
        if key not in self._node_store_dict:
            self._node_store_dict[key] = NodeStorage(_parent=self, _key=key)
        return self._node_store_dict[key]

    def get_edge_store(self, src, rel, dst):
        key = (src, rel, dst)
        if key not in self._edge_store_dict:
            self._edge_store_dict[key] = EdgeStorage(_parent=self, _key=key)
        return self._edge_store_dict[key]

    @property
    def stores(self):
        return [self._global_store, *self._node_store_dict.values(), *self._edge_store_dict.values()]
