from abc import ABC, abstractmethod

from torch_geometric.data.storage import GlobalStorage


class TensorAttr:
    """The location of a feature. Each graph has this class as an attribute."""


class FeatureStore(ABC):
    def __init__(self, attr_cls):
        self.__dict__["_tensor_attr_cls"] = attr_cls

    @abstractmethod
    def stores(self):
        pass


class BaseData:
    def __getattr__(self, key):
        raise NotImplementedError


class Data(BaseData, FeatureStore):
    def __init__(self, x=None, edge_index=None, y=None, **options):
        super().__init__(TensorAttr)
        self.__dict__["_store"] = GlobalStorage(_parent=self)
        for key, value in {"x": x, "edge_index": edge_index, "y": y, **options}.items():
            if value is not None:
                setattr(self, key, value)

    def __setstate__(self, state):
        self.__dict__.update(state)

    def __getattr__(self, key):
        return getattr(self.__dict__["_store"], key)

    def __setattr__(self, key, value):
        setattr(self._store, key, value)

    @property
    def stores(self):
        return [self._store]
